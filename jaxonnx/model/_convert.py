"""`convert`: the file of a model in another floating-point type, or with a newer opset."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import onnx
from onnx import ModelProto, NodeProto

from jaxonnx._compare.written import check_written, make_origin
from jaxonnx._display import list_some
from jaxonnx._graph.caches import find_continued
from jaxonnx._io.protos import all_nodes, opset_of
from jaxonnx._require import check_arguments, require, require_integer
from jaxonnx._rewrite import masks
from jaxonnx._rewrite.floats import (
    constants_of_bodies,
    move_casts,
    operators_without_half,
    prepare_to_halve,
    with_dtype,
)
from jaxonnx._rewrite.linear_models import open_linear_models
from jaxonnx._rewrite.opset import to_opset
from jaxonnx.errors import InputError, warn
from jaxonnx.model._load import as_model, load
from jaxonnx.model._model import Model

_LARGEST = float(np.finfo(np.float16).max)
_MASK = 1e30
"""Numbers from here on are attention masks; the least of float16 in their place hides as much."""


def convert(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    type: Literal["float16", "float32", "float64"] | None = None,
    *,
    opset: int | None = None,
    keep: Sequence[str] = (),
    keep_inputs: bool = True,
    fold_masks: bool = False,
    linear_as_gemm: bool = False,
    check: bool = True,
) -> Model:
    """Convert a model to another floating-point type, or to a newer version of ONNX's operators.

    Half precision halves the file, for runtimes on GPUs, NPUs and in browsers. The conversion is
    that of onnxruntime's tools, which leave operators without a float16 kernel in float32 between
    Casts. The result can be trained further.

    "float64" is for derivatives, solvers and samplers, and "float32" for training of a file in
    float16. Weights, constants, inputs and outputs get the type, and so do Casts to a type that
    weights of the file have, or a wider one; a Cast to a narrower type stays, and rounds as the
    file says. Operators that ONNX has in float32 alone stay there, between Casts, and a warning
    names them. Many runtimes have no float64 kernels, of which `save` warns.

    >>> import jaxonnx
    >>> from jaxonnx import demo
    >>> half = jaxonnx.convert(demo.model(), "float16")
    >>> half.params["0.weight"].dtype.name
    'float16'

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts.
      type: the type of weights and values; types stay by default. "float64" needs JAX's
        `jax_enable_x64`.
      opset: the opset of the default domain, the model's by default. Functions are inlined.
      keep: for float16: names of nodes, or operators ("Softmax"), that stay in float32. A node
        without a name goes by that of its first output.
      keep_inputs: for float16: inputs and outputs of the model stay in float32, but for the caches
        of a decoder.
      fold_masks: replace each product of a weight and a pruning mask (PyTorch's `weight_orig` and
        `weight_mask`) by a weight of the masked numbers, which can be quantized, adapted and made
        2:4. Its name is that of the product, and further training does not keep its zeros.
      linear_as_gemm: replace each LinearRegressor and LinearClassifier of ai.onnx.ml, whose numbers
        are attributes, by a Gemm, whose weights are parameters, and standard operators for labels
        and scores. They can be trained, quantized and adapted then.
      check: compare the converted file with the model on random inputs, by onnxruntime where it is
        installed; what half precision rounds is left out. A warning says so where this is not
        possible, for files of more than 256 MiB, say.

    Returns:
      A model of the converted file, whose parameters have the same names.

    Raises:
      InputError: `keep` names nothing of the model; no weight has a mask to fold; there is no
        linear model, or one with a transform that ONNX has no operator for; a weight is too large
        for float16; the converter does not take the model; onnxruntime is not installed, for
        float16; for float64, x64 is off; or the weights have a wider type than float32, for it.
      ModelError: `check` finds a difference, or onnxruntime refuses the converted file; the message
        names the first node that differs.
    """
    check_arguments(convert, locals())
    net = as_model(model)
    if fold_masks:
        net = masks.fold_masks(net)
    if opset is not None:
        require_integer("opset", opset, opset_of(net.proto), onnx.defs.onnx_opset_version())
        net = raise_opset(net, opset, "convert was asked for", check=check)
    if linear_as_gemm:
        before, net = net.to_onnx(), open_linear_models(net)
        if check:
            check_written("the file with Gemm", net.to_onnx(), before)
    if type is None:
        return net
    if type != "float16":
        require("keep", keep, not keep, f"empty for type={type!r}")
        return with_dtype(net, type)
    operators = {node.op_type for node in net.proto.graph.node}
    names = {*map(_name_of, net.proto.graph.node)}
    unknown = [name for name in keep if name not in names | operators]
    expected = f"names of nodes, or operators of the model ({list_some(sorted(operators))})"
    require("keep", unknown, not unknown, expected)
    half = _reload(_to_float16(net, keep, keep_inputs), net)
    if check:
        origin = make_origin(half, net.to_onnx())
        check_written("the converted file", half.to_onnx(), origin, rounded=True)
    return half


def raise_opset(
    model: Model, opset: int, reason: str = "the scheme needs", *, check: bool
) -> Model:
    """Convert the model to an opset if its own is older.

    Args:
      reason: the beginning of an error.
      check: compare the converted file with the model.

    Raises:
      InputError: the installed onnx does not have the opset, or cannot convert the model.
      ModelError: the converted file computes something else.
    """
    if opset_of(model.proto) >= opset:
        return model
    if onnx.defs.onnx_opset_version() < opset:
        raise InputError(
            f"{reason} opset {opset}, and the installed onnx {onnx.__version__} has "
            f"{onnx.defs.onnx_opset_version()}: update it, or choose another type"
        )
    before = model.to_onnx()
    try:
        proto = to_opset(before, opset)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"{reason} opset {opset}, the file has {opset_of(model.proto)}, and ONNX's "
            f"converter does not take it: export the model with opset {opset}. ({error})"
        ) from error
    if check:
        check_written(f"the file in opset {opset}", proto, before)
    return _reload(proto, model)


def _reload(proto: ModelProto, model: Model) -> Model:
    """Load the converted file of a model, with the same tensors as parameters."""
    if model.proto.training_info:
        warn("the training graph of the file is left out: it is not converted")
        del proto.training_info[:]
    net = load(proto)
    net = replace(
        net,
        companion=model.companion,
        source=model.source,
        new_rows=model.new_rows,
        heads=tuple(head for head in model.heads if net.tensors.keys() >= {*head.tensors}),
    )
    inlined = net.params.keys() - model.tensors.keys()  # constants of functions have new names
    return net.with_trainable(lambda name, _: name in model.params or name in inlined)


def _to_float16(model: Model, keep: Sequence[str], keep_inputs: bool) -> ModelProto:
    """Convert a model to float16 with onnxruntime's converter."""
    try:
        from onnxruntime.transformers import float16
    except ImportError as error:
        raise InputError(
            "convert to float16 needs onnxruntime's converter: pip install onnxruntime sympy"
        ) from error
    continued = find_continued(model.graph, model.inputs)
    proto = prepare_to_halve(model.to_onnx())
    graph = proto.graph
    tensors = {**model.tensors, **dict(constants_of_bodies(graph))}
    # of these, the converter itself keeps the inputs that are always float32
    single = operators_without_half(proto) - float16.ALWAYS_FLOAT_INPUTS.keys()
    blocked = {*float16.DEFAULT_OP_BLOCK_LIST, *single, *keep}
    halved: dict[str, dict[str, None]] = {}
    for node in all_nodes(graph):
        name = _name_of(node)
        if {name, node.op_type} & blocked:
            node.name = name  # by which the converter finds it
            continue
        for tensor in {*node.input} & tensors.keys():
            halved.setdefault(tensor, {})[name] = None
    large = [tensor for tensor in sorted(halved) if _overflows(tensors[tensor])]
    if large:
        readers = dict.fromkeys(repr(reader) for tensor in large for reader in halved[tensor])
        raise InputError(
            f"numbers of {list_some([*map(repr, large)])} are beyond {_LARGEST:,.0f}, the largest "
            f"of float16: keep= takes the nodes that read them, {list_some([*readers])}"
        )
    # tensors that an older file lists as inputs, which the converter would keep in float32
    listed = [value for value in graph.input if value.name in tensors]
    for value in listed:
        graph.input.remove(value)
    ends = [value.name for value in (*graph.input, *graph.output)]
    carried = {*continued, *continued.values()}
    in_float32: Any = [name for name in ends if name not in carried] if keep_inputs else False
    with warnings.catch_warnings():  # of numbers near 0, which float16 has no room for either
        warnings.simplefilter("ignore", UserWarning)
        half = float16.convert_float_to_float16(
            proto,
            keep_io_types=in_float32,
            op_block_list=[*blocked],
            node_block_list=[*keep],
        )
    move_casts(half.graph)
    types = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
    for value in listed:
        value.type.tensor_type.elem_type = types[value.name]
    half.graph.input.extend(listed)
    return half


def _name_of(node: NodeProto) -> str:
    """Return the name of a node, or that of its first output if it has none."""
    return node.name or next(filter(None, node.output), "")


def _overflows(x: Any) -> bool:
    """Check whether a float32 tensor has numbers that float16 cannot hold, masks aside."""
    if x.dtype != np.float32:
        return False
    size = np.abs(np.asarray(x))
    return bool(np.any((size > _LARGEST) & (size < _MASK)))

"""Write a model with its weights to a ModelProto or a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from onnx import ModelProto, TensorProto, helper

from jaxonnx._compare.written import (
    Origin,
    check_valid,
    check_written,
    compare_written,
    make_origin,
    warn_unproven,
)
from jaxonnx._data.images import preparation
from jaxonnx._io.formats import save as save_alone
from jaxonnx._io.protos import all_graphs, all_nodes, tensor_of_constant
from jaxonnx._io.save import to_onnx
from jaxonnx._require import require_choice
from jaxonnx._rewrite.network import Network, leave
from jaxonnx.errors import InputError, warn
from jaxonnx.model._sparsity import describe_unrecorded
from jaxonnx.quantization import is_quantized
from jaxonnx.views import Addition, CallView

N = TypeVar("N", bound=Network)
AdapterForm = Literal["merged", "nodes", "inputs"]


def to_proto(
    model: Network,
    adapters: AdapterForm | None = None,
    *,
    repeat: bool = False,
    check: bool = False,
) -> ModelProto:
    """Return the file of a model, as `Model.to_onnx` does.

    Args:
      repeat: write a parameter that equals another one a second time.
      check: check the file if it has other nodes than the one that was loaded, and compare it with
        the model if that has adapters.

    Raises:
      ModelError: `check` finds that the file is not valid, or computes something else.
    """
    # raise an InputError if there is no such form, or the model has nothing to write so
    require_choice("adapters", adapters, ("merged", "nodes", "inputs", None))
    if adapters in ("nodes", "inputs") and not model.program.adapts:
        raise InputError(
            f"adapters={adapters!r}: the model has none, or they are merged into its weights; "
            "result.lora.attach(model) gives a model with its adapters apart"
        )
    whole = model
    model, additions = _leave_views(model, adapters)
    values, adapted = model._file_values, {name for a in additions for name in a.tensors}
    proto = to_onnx(model.proto, values, model.params, model.state, repeat=repeat, adapted=adapted)
    for addition in additions:  # in the order in which the views entered
        proto = addition.write(proto)
    source, what = model.source, "the file to be saved"
    if check and (adapted or _merges_exactly(whole)):
        inputs = {name: x for addition in additions for name, x in addition.inputs.items()}
        check_written(what, proto, _with_adapters(whole)._replace(adapters=inputs))
    elif check and source is not None and (additions or _differ(model.proto, source)):
        check_valid(what, proto, partial(fill_source, whole))
    return proto


def _differ(proto: ModelProto, source: ModelProto) -> bool:
    """Check whether two files have different nodes."""
    return proto is not source and (
        proto.graph.node != source.graph.node or proto.functions != source.functions
    )


def fill_source(model: Network) -> ModelProto:
    """Return the file that was loaded, with values of its kind where these are not known."""
    source, values = model.source or model.proto, model._file_values
    tensors = {tensor.name: tensor for g in all_graphs(source.graph) for tensor in g.initializer}
    for node in all_nodes(source.graph):
        if (constant := tensor_of_constant(node)) is not None:
            tensors[node.output[0]] = constant
    filled = {}
    for name, tensor in tensors.items():
        x, dtype = values.get(name), helper.tensor_dtype_to_np_dtype(tensor.data_type)
        fits = x is not None and x.dtype == dtype and x.shape == (*tensor.dims,)
        filled[name] = x if fits else np.full(tensor.dims, "" if dtype.kind == "O" else 0, dtype)
    return to_onnx(source, filled, (), ())


def _leave_views(model: N, adapters: AdapterForm | None) -> tuple[N, list[Addition]]:
    """Remove all views; return their additions to the file in order of entry."""
    additions: list[Addition] = []
    for view in reversed(model.program.views):
        model, added = view.leave(model, adapters)
        additions = [*added, *additions]
    return model, additions


def check_nodes(model: Network) -> None:
    """Check, without writing any values, that a file can have the adapters of a model as nodes.

    Raises:
      InputError: it cannot.
    """
    bare, additions = _leave_views(model, "nodes")
    proto = bare.proto
    for addition in additions:
        proto = addition.write(proto)


def merge(model: N, *, requantize: bool = False, check: bool = False) -> N:
    """Return the model of `Model.merge_adapters`."""
    merged = model
    for view in reversed(model.program.views):
        merged = view.merge(merged, requantize=requantize)
    if check and (reason := compare_merged(model, merged)):
        warn_unproven(reason)
    return merged


def compare_merged(model: Network, merged: Network) -> str:
    """Compare the file of merged adapters with the model that has them apart.

    Adapters of weights of 16 bits or fewer, and quantized networks, are left out: merging rounds.

    Returns:
      Why it was not compared; "" if it was.

    Raises:
      ModelError: the file computes something else, as of a node.
    """
    if not _merges_exactly(model):
        return ""
    write = partial(to_proto, merged)
    return compare_written("the file with merged adapters", write, _with_adapters(model))


def _merges_exactly(model: Network) -> bool:
    """Check whether a model has adapters, and merging rounds nothing in 16 bits or fewer."""
    adapted = [name for view in model.program.views if view.adapts for name in view.targets]
    narrow = any(model.tensors[name].dtype.itemsize < 4 for name in adapted)
    rounds = narrow or is_quantized(model) or any(n.op.quantized for n in model.graph.nodes)
    return model.program.adapts and not rounds


def _with_adapters(model: Network) -> Origin:
    """Return a model whose adapters are apart as the network that a file was written from."""
    origin = make_origin(leave(model, CallView), partial(fill_source, model))
    return origin._replace(extends=True)


def save(
    model: Network,
    path: str | os.PathLike[str],
    *,
    external_data: bool,
    sparse: bool,
    adapters: AdapterForm | None,
    check: bool,
) -> None:
    """Write the file of a model, as `Model.save` does."""
    proto = partial(to_proto, model, adapters, check=check)
    if model.companion.accepts(path):
        if external_data or sparse:
            raise InputError(
                f"'{os.fspath(path)}' has neither external_data nor sparse: give the path of an "
                ".onnx file for these options"
            )
        model.companion.save(path, proto, _find_new_classes(model))
        return
    form = save_alone(
        path, proto, partial(_merge, model), external_data=external_data, sparse=sparse
    )
    if form.has_graph and _has_float64(model.proto) and not _has_float64(model.source):
        warn(
            f"'{os.fspath(path)}' is in float64, for which many runtimes have no kernels "
            "(onnxruntime has none of Conv and LSTM, for example). To deploy it, load the file "
            "that it was made from: .replace(params={n: x.astype('float32') for n, x in "
            "model.params.items()})",
        )
    if not form.has_graph or model.sparsity is not None:
        return
    if message := describe_unrecorded(model):
        warn(f"'{os.fspath(path)}': {message}")


def _has_float64(proto: ModelProto | None) -> bool:
    """Check whether a file has inputs or outputs in float64."""
    values = () if proto is None else (*proto.graph.input, *proto.graph.output)
    return any(value.type.tensor_type.elem_type == TensorProto.DOUBLE for value in values)


def record_scores(model: N, function: str) -> N:
    """Return a model whose files beside the graph say how a training reads its outputs.

    Args:
      function: "Softmax", "Sigmoid", or "" for numbers.
    """
    beside = model.companion.with_scores(function, _find_new_classes(model))
    return model if beside is model.companion else replace(model, companion=beside)


def _find_new_classes(model: Network) -> Sequence[str]:
    """Return the names of classes that the file records, or numbers for those of a new head."""
    labels = preparation(model).labels
    if len(model.heads) != 1 or model.heads[0].classes == len(labels):
        return labels
    return [f"LABEL_{number}" for number in range(model.heads[0].classes)]


def _merge(model: Network) -> dict[str, Any]:
    """Return parameters and state with adapters merged, for a file of weights alone."""
    net = merge(model)
    return {n: w for n, w in net._file_values.items() if n in net.params or n in net.state}

"""`load`: reads an ONNX file or folder into a Model."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from onnx import ModelProto

from jaxonnx._arrays import put_array, put_copies
from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.quantization_patterns import fuse_integer_products, pass_rounding
from jaxonnx._graph.roles import running_statistics, split
from jaxonnx._graph.select import Select, select
from jaxonnx._graph.stored import check_zero_points
from jaxonnx._graph.types import infer_types
from jaxonnx._io.formats import find, replace_weights
from jaxonnx._io.protocol import File
from jaxonnx._io.tensors import equal_bits
from jaxonnx._io.ties import find_duplicates, is_shared, replace_duplicates, sources
from jaxonnx._mesh.rules import Sharding
from jaxonnx._mesh.shardings import model_shardings
from jaxonnx._require import check_arguments, require_integer
from jaxonnx._rewrite.floats import with_dtype
from jaxonnx._run.program import Program
from jaxonnx.errors import InputError, warn
from jaxonnx.model._model import Model, Trainable
from jaxonnx.quantization import dequantize_weights, recorded_views, restore_attention

TRIM_LIMIT = 1 << 26
"""Bytes; reading weights above it leaves gaps in memory that are worth giving back."""


def as_model(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    mesh: Mesh | Literal["all"] | None = None,
) -> Model:
    """Return a Model as it is, and load anything else."""
    return model if isinstance(model, Model) else load(model, mesh=mesh)


def load(
    source: str | os.PathLike[str] | bytes | ModelProto,
    *,
    outputs: str | Iterable[str] | None = None,
    batch: Literal["any"] | None = None,
    dequantize: bool = False,
    dtype: Literal["float32", "float64"] | None = None,
    trainable: Trainable | None = None,
    weights: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    checkpoint: Literal["newest", "best"] | None = None,
    variant: str | None = None,
    tied: Select | None = None,
    mesh: Mesh | Literal["all"] | None = None,
    sharding: Sharding | None = None,
    limit: int | None = None,
) -> Model:
    """Load an ONNX model.

    If the weights take more than 64 MiB, `malloc_trim` of glibc is called at the end, which returns
    freed memory (about half the size of the file) to the system.

    >>> from jaxonnx import demo
    >>> proto = demo.model().to_onnx()
    >>> load(proto, trainable="14.*")
    Model(x: float32[batch, 1, 8, 8] -> logits: float32[batch, 10]; 2 trained tensors)

    Args:
      source: one of these:

        * the path of an ONNX file, or of a packed .npz that `Model.save` wrote; a file that is
          described beside it, by the `config.json` of transformers or by genai_config.json, is the
          one of that folder;
        * the bytes of a file, or a ModelProto (which is not changed);
        * the `checkpoint_dir` of a run: the model of its newest checkpoint;
        * the folder of a language model in the layout of onnxruntime-genai, optimum or
          transformers.js; an encoder and its decoder become one model, and so do the three files
          of a vision-language model, whose vision encoder is frozen unless `trainable` names it;
        * the name of such a model on the Hugging Face hub, like "onnx-community/Qwen3-0.6B-ONNX",
          if `huggingface_hub` is installed;
        * a source of any other format, once `jaxonnx.formats.register` has it.
      outputs: intermediate values to return instead of the outputs of the file, as in
        `Model.with_outputs`.
      batch: "any" makes the batch size of a file that was exported for one size variable, as in
        `Model.with_any_batch`.
      dequantize: convert weights that are stored as integers with DequantizeLinear to
        floating-point parameters. They have the name of the output of DequantizeLinear, and are
        saved in floating point. Activations that pass QuantizeLinear and DequantizeLinear are still
        rounded, with straight-through gradients.
      dtype: the type that the model computes in, its inputs and outputs included, if it is wider
        than that of the file, as in `jaxonnx.convert`. "float64" needs JAX's `jax_enable_x64`.
      trainable: the parameters, instead of the weights and biases of operators: names of tensors,
        modules or nodes, regular expressions, wildcards, or a predicate of name and value, as in
        `Model.with_trainable`.
      weights: values for tensors of the file, with the same names, shapes and dtypes. Tensors that
        are not among them keep the values of `source`; a warning names those that are Identity of a
        tensor with a new value. A checkpoint of onnxruntime-training, which has such tensors once,
        gives all of them its value. Either arrays by name, or a file:
        .safetensors, .npz (of NumPy or `sparse.save`), anything that is a `source`, or a checkpoint
        of onnxruntime-training. The eval_model.onnx of onnxruntime-training has its weights as
        inputs; they become tensors.
      checkpoint: which checkpoint of a folder: "newest" (the default), or "best" according to the
        `monitor` of `jaxonnx.train`.
      variant: which variant of a model in a folder, like "q4" for onnx/model_q4.onnx; "fp32" is the
        one without a suffix.
      tied: the weights that stay tied to another one: names or regular expressions (matched in
        full), or a predicate of name and value. It chooses among the outputs of Identity nodes of a
        weight, the names that `print(model)` gives to an initializer of at most two different
        values which several modules read, and output layers that are a copy of the embedding or its
        transpose; all others become separate parameters. The default ties weights that are equal on
        purpose: those with more than two different values that are not running statistics.
        "identity" ties all outputs of Identity nodes to their weight, whatever its values, and no
        copies, as onnxruntime-training does. Tied weights are saved in both places.
      mesh: a mesh of devices, as in `jaxonnx.train`. Each device reads its own part of a tensor, so
        that a model may be larger than the memory of one device.
      sharding: the placement on the mesh, as in `jaxonnx.train`. The default is "fsdp" if the mesh
        has an axis "data".
      limit: the maximum bytes of a single value of the graph, for untrusted files; by default the
        memory of the machine, or of its accelerators if they have more. It is checked from shapes,
        before anything is allocated.

    Raises:
      ModelError: a file is corrupt, truncated or malformed.
      SparsityError: a packed file is damaged.
      UnsupportedError: the file has operators without an implementation (all are listed), or its
        opset is too new.
      InputError: `source` has an unsupported type, several files of a folder match, or another
        argument does not fit the model; the message names it.
      OSError: a file cannot be read.
    """
    check_arguments(load, locals() | {"source": ""})  # `find` refuses other sources
    if limit is not None:
        require_integer("limit", limit)
    form, place = find(source, variant=variant, checkpoint=checkpoint)
    file = restore_attention(form.read(place))
    original = file.proto
    if weights is not None:
        file = replace_weights(file, weights)
    if dequantize:
        file = dequantize_weights(file)
    # bind the graph of a file, and tell what is learned: parameters, state and constants
    proto, tensors, companion = file
    graph = _tie(bind(proto, proto.graph, tensors.keys()), file, tied)
    infer_types(graph, tensors)  # refuses those that differ
    check_zero_points(graph, tensors)
    graph = pass_rounding(fuse_integer_products(graph, tensors), tensors)
    params, state, constants = split(graph, tensors, proto.graph)
    state |= {name: params.pop(name) for name in [*params] if companion.freezes(name)}
    originals = {
        name: file.tensors[name]
        for name in (*params, *state)
        if file.tensors[name].dtype != jax.dtypes.canonicalize_dtype(file.tensors[name].dtype)
    }
    file.tensors.clear()  # so that each array is freed as soon as it is copied
    program = Program(graph, constants, recorded_views(file.proto), limit)
    model = Model(
        params, state, file.proto, program, originals, companion=file.companion, source=original
    )
    # move parameters and state to the devices, in place: what a model caches would keep the arrays
    # of the file
    placement = {} if mesh is None else model_shardings(replace(model), mesh, sharding)
    for group in (model.params, model.state):
        for name in group:
            group[name] = _to_device(group[name], placement.get(name))
    values = [*model.params.values(), *model.state.values()]
    if sum(value.nbytes for value in values) > TRIM_LIMIT:
        jax.block_until_ready(values)
        gc.collect(0)  # JAX lets go of the arrays that it has copied when Python collects
        # glibc would keep half the size of a large model, in the gaps that reading it left
        trim = getattr(ctypes.pythonapi, "malloc_trim", None)
        if trim is not None:
            trim(0)
    model = model if outputs is None else model.with_outputs(outputs)
    model = model if batch is None else model.with_any_batch()
    model = model if dtype is None else with_dtype(model, dtype)
    for warning in model.warnings:
        if warning.startswith(("64-bit", "metadata_props", "this seems to be an eval_model.onnx")):
            warn(warning)
    return model if trainable is None else model.with_trainable(trainable)


def _to_device(value: Any, sharding: NamedSharding | None) -> jax.Array:
    """Copy an array to the devices, so that later writes to `value` do not reach it."""
    base = value.base
    while isinstance(base, np.ndarray):
        base = base.base
    # jnp.array copies twice; of a file's own bytes, which nobody changes, one copy is enough
    if sharding is None:
        return jax.device_put(value) if isinstance(base, bytes) else jnp.array(value)
    return (put_array if isinstance(base, bytes) else put_copies)(value, sharding)


def _tie(graph: Graph, file: File, requested: Select | None) -> Graph:
    """Make nodes of the tensors that stay tied to another one, in place, as `load(tied=)` says."""
    proto, tensors, _ = file
    statistics = running_statistics(graph)
    copies = {} if proto.training_info else find_duplicates(proto.graph, tensors)
    pairs = copies | {
        name: of
        for name, of in sources(proto.graph, tensors).items()
        if name not in statistics
        and of not in statistics
        and jnp.issubdtype(tensors[name].dtype, jnp.floating)
    }
    if requested is None:
        names = {*copies, *(n for n, of in pairs.items() if is_shared(tensors[n], tensors[of]))}
    elif isinstance(requested, str) and requested == "identity":
        names = {*pairs} - {*copies}
    else:
        kind = "tensor that could be tied"
        names = select(requested, {n: tensors[n] for n in pairs}, "tied", kind=kind)
    for name in names - copies.keys():
        if requested is not None and not equal_bits(tensors[name], tensors[pairs[name]]):
            raise InputError(
                f"tied={name!r}: it has other values than '{pairs[name]}', so that one of them "
                "would be lost; leave it out of tied="
            )
    if not names:
        return graph
    replace_duplicates(proto.graph, {n: of for n, of in copies.items() if n in names}, tensors)
    for name in names:
        del tensors[name]
    return bind(proto, proto.graph, tensors.keys())

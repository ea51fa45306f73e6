"""Inputs and outputs as the file declares them, and arguments checked against them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import TensorProto, TensorShapeProto, ValueInfoProto, helper

from jaxonnx.errors import InputError, ModelError
from jaxonnx.lowering import to_array

_NAMELESS = ("", "?", "-1")


@dataclass(frozen=True)
class Value:
    """An input or output: its name, NumPy dtype and shape (names or None for dynamic dimensions).

    `dtype` is None for sequences, maps and optionals, `shape` is None where the rank is unknown.
    """

    name: str
    dtype: np.dtype | None
    shape: tuple[int | str | None, ...] | None
    whole: bool = False
    """Whether an input has no axis of examples: it is passed whole with each batch (`batching`)."""
    rows: int | None = None
    """The number of rows of the table that an input chooses from, where it does."""
    counted: bool = False
    """Whether attention takes the sum of an input, a mask of tokens, as the length of a text."""

    def __str__(self) -> str:
        shape = (
            ""
            if self.shape is None
            else ", ".join("?" if d is None else str(d) for d in self.shape)
        )
        kind = "string" if self.dtype == object else self.dtype or "sequence, map or optional"
        return f"{self.name}: {kind}[{shape}]"


def hint_at_image(values: Iterable[Value], size: int) -> str:
    """Return a hint for errors where the first axis of an input may be channels; else "".

    Args:
      values: the inputs.
      size: the size that was taken for the batch.
    """
    for value in values:
        shape = value.shape or ()
        if len(shape) == 3 and shape[0] == size and size in (3, 4):
            return (
                f". Or is '{value.name}' {[*shape]} one image of {size} channels, without a batch? "
                "Then model.with_batch_axis() takes several, and jaxonnx.train does so by itself"
            )
    return ""


def to_value(info: ValueInfoProto) -> Value:
    """Return the Value that a ValueInfoProto declares."""
    if not info.type.HasField("tensor_type"):
        return Value(info.name, None, None)
    tensor = info.type.tensor_type
    dtype = None
    if tensor.elem_type not in (TensorProto.UNDEFINED, TensorProto.STRING):
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        except KeyError:
            raise ModelError(
                f"'{info.name}' has element type {tensor.elem_type}, which ONNX does not define"
            ) from None
    elif tensor.elem_type == TensorProto.STRING:
        dtype = np.dtype(object)
    if not tensor.HasField("shape"):
        return Value(info.name, dtype, None)
    return Value(info.name, dtype, tuple(map(dimension, tensor.shape.dim)))


def dimension(dim: TensorShapeProto.Dimension) -> int | str | None:
    """Return the size of a dimension, its name if it is symbolic, or None if it has neither.

    A negative size is an open one, as in onnxruntime. Exporters that know no name write "?" or "-1"
    for every open dimension, so that two of them need not be equal.
    """
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return None if dim.dim_param in _NAMELESS else dim.dim_param


def list_values(values: Sequence[Value]) -> str:
    """Return values as a list for a sentence."""
    return ", ".join(map(str, values)) or "nothing"


def arguments(
    values: Sequence[Value],
    optional: Collection[str],
    inputs: Sequence[Any],
    named: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a call by the names of the inputs, checked.

    Args:
      values: the required inputs, in order.
      optional: further inputs, which may be passed by name.
      inputs: the arguments by position.
      named: those by name.

    Raises:
      InputError: too many, missing, unknown or twice; or an argument does not fit.
    """
    if len(inputs) > len(values):
        raise InputError(
            f"the model takes {len(values)} inputs, {len(inputs)} were given: {list_values(values)}"
        )
    bound = dict(zip((v.name for v in values), inputs, strict=False))
    accepted = {*optional, *(value.name for value in values)}
    for name, value in named.items():
        if name in bound:
            raise InputError(f"input '{name}' was given twice, by position and by name")
        if name not in accepted:
            raise InputError(f"the model has no input '{name}'; it has {list_values(values)}")
        bound[name] = value
    sizes: dict[str, tuple[int, str]] = {}
    for value in values:
        if value.name not in bound:
            raise InputError(
                f"input '{value.name}' is missing; the model takes {list_values(values)}"
            )
        bound[value.name] = fit(value, bound[value.name], sizes)
    return bound


def fit(value: Value, array: Any, sizes: dict[str, tuple[int, str]]) -> Any:
    """Convert an argument to an array and check it against the declared input.

    Args:
      value: the input.
      array: the argument; numbers and lists are converted, arrays must have the right dtype. Those
        of NumPy have the one that JAX gives them, as under `jax.jit`.
      sizes: the size of each symbolic dimension so far, and the input that had it; it is extended.

    Raises:
      InputError: dtype, rank or a dimension does not fit.
    """
    if value.dtype is None:
        return array
    if value.dtype == object:
        if isinstance(array, str | list | tuple):
            array = np.asarray(array, object)
        if isinstance(array, np.ndarray) and array.dtype.kind in "UT":
            array = array.astype(object)
        if not isinstance(array, np.ndarray) or array.dtype != object:
            raise InputError(f"input {value} takes strings, and was given {type(array).__name__}")
        if others := {type(x).__name__ for x in array.flat if not isinstance(x, str | bytes)}:
            raise InputError(f"input {value} takes strings, and was given {', '.join(others)}")
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(
            f"input {value} was given a masked array, which has no values where its mask is; "
            ".filled(0) puts some there"
        )
    if isinstance(array, bool | int | float | list | tuple):
        try:
            array = np.asarray(array, value.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"input {value} cannot be converted to an array: {error}") from error
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        raise InputError(f"input '{value.name}' must be an array, got {type(array).__name__}")
    canonical = jax.dtypes.canonicalize_dtype(value.dtype)
    if isinstance(array, np.ndarray | np.generic) and dtype not in (value.dtype, canonical):
        array = _canonicalize(array)
        dtype = array.dtype
    if dtype not in (value.dtype, canonical):
        widens = dtype == np.float64 and jnp.issubdtype(value.dtype, jnp.floating)
        raise InputError(
            f"input {value} was given {dtype}; convert it with .astype('{value.dtype}'), jaxonnx "
            "casts nothing silently"
            + (", or the model with jaxonnx.convert(model, 'float64')" if widens else "")
        )
    if value.shape is not None:
        shape = tuple(array.shape)
        if len(shape) != len(value.shape):
            raise InputError(
                f"input {value} has rank {len(value.shape)}, but was given shape {list(shape)}"
            )
        for axis, (size, declared) in enumerate(zip(shape, value.shape, strict=True)):
            if isinstance(declared, str):
                before, where = sizes.setdefault(declared, (size, value.name))
                if before != size:
                    raise InputError(
                        f"input '{value.name}' has size {size} along axis {axis}, but '{declared}' "
                        f"was {before} in input '{where}': the two must agree"
                    )
            elif declared is not None and declared != size:
                way = "" if axis else "; jaxonnx.load(path, batch='any') may open the batch"
                raise InputError(
                    f"input {value} needs size {declared} along axis {axis}, but was given shape "
                    f"{list(shape)}{way}"
                )
    return array


def _canonicalize(array: Any) -> Any:
    """Convert an array of NumPy to the type that it has as an argument of `jax.jit`.

    While JAX's 64-bit types are off, that of 64 bits has 32. Integers that do not fit stay.
    """
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    fits = array.dtype.kind not in "iu" or bool((narrow == array).all())
    return narrow if fits else array


def data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert floating-point arguments to JAX arrays.

    NumPy arrays would be known values, which only integers, as shapes and axes, need to be.
    """
    return {
        name: jnp.asarray(value)
        if isinstance(value, np.ndarray) and jnp.issubdtype(value.dtype, jnp.floating)
        else value
        for name, value in values.items()
    }


def matching(what: str, current: dict, new: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `new` in the order of `current`; `current` itself if `new` is None.

    Raises:
      InputError: names, shapes or dtypes differ.
    """
    if new is None:
        return current
    if new.keys() != current.keys():
        unmatched = sorted(new.keys() ^ current.keys())
        raise InputError(
            f"{what} must have the names of the model's; these differ: {', '.join(unmatched)}"
        )
    for name, value in new.items():
        if value.shape != current[name].shape:
            raise InputError(
                f"{what} '{name}' has shape {list(value.shape)}, the model's is "
                f"{list(current[name].shape)}"
            )
        check_dtype(what, name, value, current[name].dtype)
    return {name: to_array(new[name]) for name in current}


def check_dtype(what: str, name: str, value: Any, dtype: np.dtype) -> None:
    """Raise an InputError if a new tensor is not of the dtype of the model's."""
    if value.dtype != dtype:
        half, wider = value.dtype.name == "float16", value.dtype.name in ("float32", "float64")
        converts = half or (wider and value.dtype.itemsize > dtype.itemsize)
        raise InputError(
            f"{what} '{name}' is {value.dtype}, the model's is {dtype}, which the nodes that read "
            f"it need; convert it with .astype('{dtype}')"
            + (f", or the model with jaxonnx.convert(model, '{value.dtype}')" if converts else "")
        )

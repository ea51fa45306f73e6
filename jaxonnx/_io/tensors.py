"""The values of TensorProtos: inline, in external files, sparse, or of types that share bytes."""

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from jaxonnx._io.external import Folder, map_external
from jaxonnx._limits import FOLDED, check_size, count_elements
from jaxonnx.errors import LimitError, ModelError

_BITS: dict[int, int] = {
    TensorProto.UINT4: 4,
    TensorProto.INT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.UINT2: 2,
    TensorProto.INT2: 2,
    TensorProto.FLOAT6E2M3: 6,
    TensorProto.FLOAT6E3M2: 6,
}
"""Bits of the element types that share bytes."""


def to_array(tensor: TensorProto, folders: Sequence[Folder] = ()) -> np.ndarray:
    """Return the value of a TensorProto; external data is memory-mapped from one of `folders`.

    Raises:
      ModelError: the element type is unknown, or the data does not fill the shape.
      LimitError: it is empty, and its other axes are longer than memory.
    """
    shape = tuple(tensor.dims)
    try:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except KeyError:
        raise ModelError(
            f"tensor '{tensor.name}' has element type {tensor.data_type}, unknown to ONNX"
        ) from None
    if any(dim < 0 for dim in shape):
        raise ModelError(f"tensor '{tensor.name}' has a negative dimension: {list(shape)}")
    # nothing of the file stands for the other axes of an empty tensor
    if 0 in shape and count_elements(shape) * dtype.itemsize > FOLDED:
        try:
            check_size(shape, dtype, host=True)
        except LimitError as error:
            raise LimitError(f"tensor '{tensor.name}': {error}") from None
    if tensor.data_location == TensorProto.EXTERNAL:
        data = map_external(tensor, folders)
    elif tensor.HasField("raw_data"):
        data = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        try:
            return numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"the data of tensor '{tensor.name}' does not fit its shape {list(shape)} ({error})"
            ) from error
    if tensor.data_type == TensorProto.STRING:
        raise ModelError(f"tensor '{tensor.name}' holds strings, which must lie in string_data")
    bits = _BITS.get(tensor.data_type, 8 * dtype.itemsize)
    expected = -(-math.prod(shape) * bits // 8)
    if data.nbytes != expected:
        raise ModelError(
            f"tensor '{tensor.name}' of shape {list(shape)}, type {dtype}, needs {expected} bytes "
            f"but has {data.nbytes}; the file is truncated or inconsistent"
        )
    try:
        if tensor.data_type in _BITS:
            inline = TensorProto(data_type=tensor.data_type, dims=shape, raw_data=data.tobytes())
            return numpy_helper.to_array(inline)
        return data.view(dtype).reshape(shape)
    except ValueError as error:  # more dimensions, or larger ones, than an array can have
        raise ModelError(f"tensor '{tensor.name}' of shape {list(shape)}: {error}") from error


def to_dense(sparse: onnx.SparseTensorProto, folders: Sequence[Folder] = ()) -> np.ndarray:
    """Convert a SparseTensorProto to an array (IR: indices are linear, or one row per value).

    Raises:
      ModelError: what onnx.checker refuses: values that are not one-dimensional, another number
        of indices, indices outside the shape or not in ascending order.
      LimitError: the array would be larger than memory.
    """
    values, indices = to_array(sparse.values, folders), to_array(sparse.indices, folders)
    shape = tuple(sparse.dims)
    what = f"sparse tensor '{sparse.values.name}' of shape {list(shape)}"
    rows = (values.size,) if indices.ndim == 1 else (values.size, len(shape))
    if values.ndim != 1 or indices.shape != rows or indices.dtype != np.int64:
        raise ModelError(
            f"{what}: indices {indices.dtype}{list(indices.shape)} do not fit values "
            f"{list(values.shape)}"
        )
    check_size(shape, values.dtype, host=True)
    try:
        dense = np.zeros(shape, values.dtype)
        places = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
        flat = np.asarray(places)
    except (ValueError, TypeError, MemoryError) as error:
        raise ModelError(f"{what}: its indices do not fit ({error})") from error
    if flat.size and not (flat[0] >= 0 and flat[-1] < dense.size and (np.diff(flat) > 0).all()):
        raise ModelError(f"{what}: the indices must be in the shape and in ascending order")
    dense.reshape(-1)[flat] = values
    return dense


def equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Check whether two arrays are equal bit for bit."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a is b or a.dtype == object:
        return a is b or bool(np.array_equal(a, b))
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(first, second)

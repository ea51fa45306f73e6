"""The storage form of sparse weights: values and small indices, and a packed `.npz`.

Each pattern has its form. That of N:M stores, of every M weights along one axis, the N kept values,
and for each its place in the group in ceil(log2 M) bits. For 2:4 in float32 that is 53 % of the
dense bytes, in bfloat16 56 %.

CUTLASS (and with it the `SparseSemiStructuredTensor` of PyTorch) keeps the kept weights row by row,
and their places, two bits each, in metadata whose elements stand in the order in which the threads
of a tensor core read them: `reorder_meta` of `tools/util/include/cutlass/util/host_reorder.h`, laid
out by `ColumnMajorInterleaved<2>` of `include/cutlass/layout/matrix.h`. The compressed matrix of
cuSPARSELt is not documented: only the library itself makes it.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._files import read_arrays, wrap_errors, write_atomically
from jaxonnx._require import check_arguments, require
from jaxonnx.errors import SparsityError
from jaxonnx.sparse._layers import Layer, by_name, goals
from jaxonnx.sparse._nm import Pattern
from jaxonnx.sparse._pattern import SparsityPattern, default_axes, parse

INDEX = "__packed__"
"""The name of the array in a packed file that describes the others."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "indices"],
    meta_fields=["shape", "axis", "pattern"],
)
@dataclass(frozen=True)
class Packed:
    """One weight in the storage form along `axis`; a pytree, so `unpack` can be jitted over it."""

    values: np.ndarray | jax.Array
    """The kept weights. Of N:M [..., groups, n], in ascending place, `axis` moved to the end."""
    indices: np.ndarray | jax.Array
    """uint8: their places. Of N:M those in the group, ceil(log2 m) bits each, low bits first."""
    shape: tuple[int, ...]
    axis: int
    pattern: SparsityPattern

    @property
    def n(self) -> int:
        """N of an N:M pattern."""
        return self.pattern.n  # type: ignore[attr-defined]

    @property
    def m(self) -> int:
        """M of an N:M pattern."""
        return self.pattern.m  # type: ignore[attr-defined]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.indices.nbytes


def pack(
    w: jax.Array | np.ndarray,
    mask: jax.Array | np.ndarray | None = None,
    pattern: str | SparsityPattern = "2:4",
    *,
    axis: int | None = None,
) -> Packed:
    """Convert a weight to its storage form, without loss.

    >>> packed = pack(np.array([[0.0, 5.0, 7.0, 0.0]], np.float32))
    >>> packed.values.tolist(), packed.nbytes  # of 16
    ([[[5.0, 7.0]]], 9)
    >>> unpack(packed).tolist()
    [[0.0, 5.0, 7.0, 0.0]]

    Args:
      w: weight, zero outside the mask.
      mask: nonzero where a weight is kept, shaped like `w`; by default the nonzero weights are. A
        kept weight may be 0: with a mask its place is stored as kept.
      pattern: "N:M", or any `SparsityPattern`.
      axis: the axis that the groups lie along; by default the input axis of the layout (see
        `mask`). A transposable weight packs along either axis; a product with its transpose needs
        the pack along the output axis.

    Raises:
      SparsityError: a mask of another shape, a nonzero weight outside it, more than N kept in a
        group, or an axis that is not a multiple of M.
    """
    check_arguments(pack, locals())
    pattern = parse(pattern)
    w = np.asarray(w)
    require("w", w, w.ndim > 0, "an array of one axis or more", SparsityError)
    axis = (default_axes(w.ndim)[1] if axis is None else axis) % w.ndim
    nonzero = w != 0 if mask is None else np.asarray(mask) != 0
    if nonzero.shape != w.shape:
        raise SparsityError(f"a mask of shape {nonzero.shape} for a weight of shape {w.shape}")
    if (w[~nonzero] != 0).any():
        raise SparsityError("the weight is not zero outside its mask: packing would lose weights")
    return Packed(*pattern.pack(w, nonzero, axis), w.shape, axis, pattern)


def unpack(packed: Any) -> Any:
    """Replace every `Packed` in a pytree (or a single one) by its dense weight.

    Works under jit: `jax.jit(lambda params, x: f(unpack(params), x))` runs from packed weights.
    """
    return jax.tree.map(
        lambda x: _dense(x) if isinstance(x, Packed) else x,
        packed,
        is_leaf=lambda x: isinstance(x, Packed),
    )


def _dense(packed: Packed) -> jax.Array:
    values, indices = jnp.asarray(packed.values), jnp.asarray(packed.indices)
    return _unpack(packed.pattern, values, indices, packed.shape, packed.axis)


@partial(jax.jit, static_argnums=(0, 3, 4))
def _unpack(pattern, values, indices, shape, axis):
    """Unpack in one compiled program: eagerly, each of its dozens of operations would be one."""
    return pattern.unpack(values, indices, shape, axis)


def unpack_mask(packed: Packed) -> jax.Array:
    """Return the mask of the stored places; for N:M it has exactly N ones in every M."""
    check_arguments(unpack_mask, locals())
    return _dense(replace(packed, values=np.ones(packed.values.shape, bool)))


def save(
    path: str | os.PathLike[str], params: Any, masks: dict[str, Any], *, layers: Iterable[Layer]
) -> None:
    """Write all of `params` to a `.npz`, the sparse weights packed along their input axis.

    The write is atomic: the file appears under its name when it is complete, or not at all. A pipe
    or a device is written to directly.

    Args:
      params: a pytree; arrays are stored by name, those without a mask as they are.
      masks: the masks of the sparse weights by name (`state_masks`).
      layers: the report with their axes and patterns (`layers`).
    """
    check_arguments(save, locals())
    sparse = goals(layers)
    leaves = {name: np.asarray(x) for name, x in by_name(params).items()}
    for name in masks:
        if name not in leaves or name not in sparse:
            raise SparsityError(f"there is a mask for {name!r}, but no such sparse weight")
    arrays, index = {}, {}
    for name, x in leaves.items():
        entry: dict[str, Any] = {"dtype": x.dtype.name}
        if name in masks:
            pattern, axes = sparse[name].pattern, sparse[name].axes
            packed = pack(x, masks[name], pattern, axis=axes[1])
            arrays[f"indices:{name}"], x = packed.indices, packed.values
            entry |= {"shape": packed.shape, "axis": packed.axis, "pattern": pattern.name}
            entry["transposable"] = pattern.transposable
        # npz knows no bfloat16 or float8: those go as plain integers of their width
        arrays[f"values:{name}"] = x if x.dtype.isbuiltin else x.view(f"u{x.dtype.itemsize}")
        index[name] = entry
    arrays[INDEX] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    with write_atomically(path) as written, written.open("wb") as file:
        np.savez(file, **arrays)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Packed]]:
    """Return the arrays and the packed weights of a file that `save` wrote, both by name.

    Raises:
      SparsityError: the file is truncated, inconsistent, or was not written by `save`.
    """
    check_arguments(load, locals())
    failure = f"{path} is not a packed file, or is damaged"
    arrays = read_arrays(path, failure, SparsityError)
    with wrap_errors(failure, SparsityError):
        index = json.loads(arrays.pop(INDEX).tobytes())
        dense, packed = {}, {}
        for name, entry in index.items():
            x = arrays.pop(f"values:{name}")
            dtype = jnp.dtype(entry["dtype"])
            if not jnp.issubdtype(dtype, jnp.number) and dtype.kind != "b":
                raise SparsityError(f"{failure}: '{name}' has the type {dtype}")
            x = x if x.dtype == dtype else x.view(dtype)
            if "shape" in entry:
                packed[name] = _check_entry(name, x, arrays.pop(f"indices:{name}"), entry)
            else:
                dense[name] = x
    if arrays:
        raise SparsityError(f"{path} has arrays that its index does not name: {', '.join(arrays)}")
    return dense, packed


def _check_entry(name: str, values: np.ndarray, indices: np.ndarray, entry: dict) -> Packed:
    """Return a packed weight of an untrusted file from its arrays and its entry in the index.

    Raises:
      SparsityError: they contradict each other.
    """
    # older files, which could only be N:M, have n and m
    named = entry["pattern"] if "pattern" in entry else f"{entry['n']}:{entry['m']}"
    pattern = parse(named, bool(entry.get("transposable", True)))
    shape, axis = tuple(entry["shape"]), entry["axis"]
    if any(type(x) is not int or x < 0 for x in (*shape, axis)) or axis >= len(shape):
        raise SparsityError(f"{name}: there is no axis {axis} of a weight of shape {[*shape]}")
    if damage := pattern.damage(values, indices, shape, axis):
        raise SparsityError(f"{name}: {damage}")
    return Packed(values, indices, shape, axis, pattern)


_ROWS = 8
"""The rows of the matrix that one group of a tensor core's threads reads together."""


def to_cutlass(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Return a 2:4 matrix as the two operands of CUTLASS's sparse product.

    >>> import jaxonnx.sparse as sparse
    >>> w = np.tile(np.array([1, 0, 2, 0], np.float16), (32, 8))
    >>> values, metadata = to_cutlass(sparse.pack(w))
    >>> values.shape, metadata.shape, metadata.dtype, hex(metadata[0, 0])
    ((32, 16), (32, 2), dtype('uint16'), '0x8888')

    Args:
      packed: a matrix (`pack`) in float16, bfloat16 or int8. The other axis than the packed one,
        the rows, is a multiple of 32 (int8: 16), and the packed one of 32 (int8: 64).

    Returns:
      The kept weights, (rows, columns / 2), and the metadata: uint16 of shape (rows, columns / 16),
      or for int8 uint32 of shape (rows, columns / 32).

    Raises:
      SparsityError: another pattern, type or size.
    """
    check_arguments(to_cutlass, locals())
    values = np.asarray(packed.values)
    if packed.pattern not in (Pattern(2, 4), Pattern(2, 4, False)) or values.ndim != 3:
        raise SparsityError(f"CUTLASS takes 2:4 matrices, not {packed.pattern}{[*packed.shape]}")
    word, rows = _metadata_dtype(values.dtype), values.shape[0]
    columns = values.shape[1] * 4
    _check_size(rows, columns, word)
    metadata = np.asarray(packed.indices).view(word.newbyteorder("<")).astype(word)
    return values.reshape(rows, -1), _reorder(metadata.reshape(rows, -1))


def from_cutlass(values: np.ndarray, metadata: np.ndarray, *, axis: int = 1) -> Packed:
    """Return a matrix from the operands of CUTLASS's sparse product: the inverse of `to_cutlass`.

    Args:
      values: the kept weights, (rows, columns / 2).
      metadata: their places, as `to_cutlass` returns them; signed integers count as unsigned.
      axis: the axis of the matrix that is packed: with 0 the rows here are its columns.

    Raises:
      SparsityError: sizes that do not belong together, or places that are not in ascending order.
    """
    check_arguments(from_cutlass, locals())
    word = _metadata_dtype(values.dtype)
    require("values", values, values.ndim == 2, "a matrix", SparsityError)
    rows, half = values.shape
    _check_size(rows, 2 * half, word)
    if metadata.dtype.itemsize != word.itemsize or metadata.shape != (
        rows,
        half // word.itemsize // 4,
    ):
        raise SparsityError(
            f"metadata of {metadata.dtype}{[*metadata.shape]} for {values.dtype}{[*values.shape]}"
        )
    ordered = _restore(metadata.view(word)).astype(word.newbyteorder("<"))
    shape = (rows, 2 * half) if axis % 2 else (2 * half, rows)
    pairs, places = values.reshape(rows, -1, 2), np.ascontiguousarray(ordered).view(np.uint8)
    packed = Packed(pairs, places.reshape(-1), shape, axis % 2, Pattern(2, 4, False))
    if damage := packed.pattern.damage(pairs, places.reshape(-1), shape, axis % 2):
        raise SparsityError(f"metadata: {damage}")
    return packed


def _metadata_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the metadata elements for a matrix of `dtype`.

    Raises:
      SparsityError: the hardware has no 2:4 product of `dtype`.
    """
    if dtype == np.int8:
        return np.dtype(np.uint32)
    if dtype in (np.float16, jnp.bfloat16):
        return np.dtype(np.uint16)
    raise SparsityError(
        f"values must be float16, bfloat16 or int8, as in 2:4 products of the hardware, got {dtype}"
    )


def _check_size(rows: int, columns: int, word: np.dtype) -> None:
    # a tile of the metadata's layout: 32 x 32 elements of the matrix in half precision, 16 x 64
    # in int8
    group, width = 64 // word.itemsize, 16 * word.itemsize
    if rows % group or columns % width:
        raise SparsityError(
            f"{rows} x {columns}: CUTLASS takes multiples of {group} rows and {width} columns"
        )


def _reorder(metadata: np.ndarray) -> np.ndarray:
    """Reorder the elements of metadata (rows, columns) from row-major to the hardware's order."""
    rows, columns = metadata.shape
    lanes = 64 // metadata.itemsize // _ROWS  # groups of _ROWS rows that interleave: 4, int8: 2
    x = metadata.reshape(-1, lanes, _ROWS, columns).swapaxes(1, 2)  # interleave distant rows
    x = x.reshape(rows // 2, 2, columns // 2, 2).swapaxes(1, 3)  # transpose blocks of 2 x 2
    x = x.reshape(rows, columns // 2, 2).swapaxes(0, 1)  # pairs of columns, one below the other
    return np.ascontiguousarray(x).reshape(rows, columns)


def _restore(metadata: np.ndarray) -> np.ndarray:
    """Invert `_reorder`: its three steps backwards."""
    rows, columns = metadata.shape
    lanes = 64 // metadata.itemsize // _ROWS
    x = metadata.reshape(columns // 2, rows, 2).swapaxes(0, 1)
    x = x.reshape(rows // 2, 2, columns // 2, 2).swapaxes(1, 3)
    x = x.reshape(-1, _ROWS, lanes, columns).swapaxes(1, 2)
    return np.ascontiguousarray(x).reshape(rows, columns)

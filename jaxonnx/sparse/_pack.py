"""The storage form of N:M sparse weights: values and small indices, and a packed `.npz`.

Of every M weights along one axis the N kept values are stored, and for each its place in the group
in ceil(log2 M) bits. For 2:4 in float32 that is 53 % of the dense bytes, in bfloat16 56 %.
"""

import json
import os
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx.errors import SparsityError
from jaxonnx.sparse._layers import Layer, name_of
from jaxonnx.sparse._masks import Pattern, default_axes, parse

_INDEX = "__packed__"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "indices"],
    meta_fields=["shape", "axis", "n", "m"],
)
@dataclass(frozen=True)
class Packed:
    """One weight in the storage form along `axis`; a pytree, so `unpack` can be jitted over it."""

    values: np.ndarray | jax.Array
    """[..., groups, n]: the kept weights in ascending place, `axis` moved to the end."""
    indices: np.ndarray | jax.Array
    """uint8: their places in the group, ceil(log2 m) bits each, low bits first."""
    shape: tuple[int, ...]
    axis: int
    n: int
    m: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.indices.nbytes


def pack(
    w: jax.Array | np.ndarray,
    mask: jax.Array | np.ndarray | None = None,
    pattern: str | Pattern = "2:4",
    *,
    axis: int | None = None,
) -> Packed:
    """The storage form of a weight, lossless.

    >>> packed = pack(np.array([[0.0, 5.0, 7.0, 0.0]], np.float32))
    >>> packed.values.tolist(), packed.nbytes  # of 16
    ([[[5.0, 7.0]]], 9)
    >>> unpack(packed).tolist()
    [[0.0, 5.0, 7.0, 0.0]]

    Args:
      w: weight, zero outside the mask.
      mask: what is kept, shaped like `w`; by default the nonzero weights. A kept weight may be 0:
        with a mask its place is stored as such.
      pattern: "N:M".
      axis: the axis that the groups lie along; by default the input axis of the layout (see
        `mask`). A transposable weight packs along either axis; a product with its transpose needs
        the pack along the output axis.

    Raises:
      SparsityError: a mask of another shape, a nonzero weight outside it, more than N kept in a
        group, or an axis that is not a multiple of M.
    """
    pattern = parse(pattern)
    w = np.asarray(w)
    axis = (default_axes(w.ndim)[1] if axis is None else axis) % w.ndim
    kept = w != 0 if mask is None else np.asarray(mask) != 0
    if kept.shape != w.shape:
        raise SparsityError(f"a mask of shape {kept.shape} for a weight of shape {w.shape}")
    if w.shape[axis] % pattern.m:
        raise SparsityError(f"axis {axis} of {w.shape[axis]} is not a multiple of {pattern.m}")
    if (w[~kept] != 0).any():
        raise SparsityError("the weight is not zero outside its mask: packing would lose weights")
    groups, kept = (np.moveaxis(x, axis, -1) for x in (w, kept))
    groups, kept = (x.reshape(*x.shape[:-1], -1, pattern.m) for x in (groups, kept))
    if (most := int(kept.sum(-1).max(initial=0))) > pattern.n:
        raise SparsityError(
            f"a group along axis {axis} keeps {most} of {pattern.m}, not at most {pattern.n}"
        )
    # the kept places, filled up to N with the first others, in ascending order
    places = np.sort(np.argsort(~kept, axis=-1, kind="stable")[..., : pattern.n], axis=-1)
    return Packed(
        values=np.take_along_axis(groups, places, -1),
        indices=_to_bits(places, _width(pattern.m)),
        shape=w.shape,
        axis=axis,
        n=pattern.n,
        m=pattern.m,
    )


def unpack(packed: Any) -> Any:
    """The dense weight back from `pack`, or a pytree with every packed weight in it unpacked.

    Works under jit: `jax.jit(lambda params, x: f(unpack(params), x))` runs from packed weights.
    """
    return jax.tree.map(
        lambda x: _dense(x) if isinstance(x, Packed) else x,
        packed,
        is_leaf=lambda x: isinstance(x, Packed),
    )


def _dense(packed: Packed) -> jax.Array:
    places = _from_bits(jnp.asarray(packed.indices), packed.values.shape, _width(packed.m))
    hit = places[..., None] == jnp.arange(packed.m, dtype=jnp.uint8)
    values = jnp.asarray(packed.values)[..., None]
    # one place is hit by one value at most, and a select keeps its bits where a sum would not
    dense = jnp.zeros(hit.shape[:-2] + hit.shape[-1:], values.dtype)
    for k in range(packed.n):
        dense = jnp.where(hit[..., k, :], values[..., k, :], dense)
    return jnp.moveaxis(dense.reshape(*dense.shape[:-2], -1), -1, packed.axis)


def unpack_mask(packed: Packed) -> jax.Array:
    """The mask of the stored places, exactly N of every M."""
    return unpack(Packed(np.ones(packed.values.shape, bool), packed.indices, *_form(packed)))


def _form(packed: Packed) -> tuple:
    return packed.shape, packed.axis, packed.n, packed.m


def _width(m: int) -> int:
    return (m - 1).bit_length()


def _to_bits(places: np.ndarray, width: int) -> np.ndarray:
    bits = (places.reshape(-1, 1) >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def _from_bits(words: jax.Array, shape: tuple[int, ...], width: int) -> jax.Array:
    count = int(np.prod(shape))
    bits = jnp.unpackbits(words, count=count * width, bitorder="little").reshape(count, width)
    return jnp.sum(bits << jnp.arange(width, dtype=jnp.uint8), axis=1, dtype=jnp.uint8).reshape(
        shape
    )


def save(
    path: str | os.PathLike,
    params: Any,
    masks: dict[str, Any],
    *,
    layers: Iterable[Layer],
    pattern: str | Pattern = "2:4",
) -> None:
    """Writes all of `params` to a `.npz`, the sparse weights packed along their input axis.

    The file appears under its name when it is complete, or not at all.

    Args:
      params: a pytree; arrays are stored by name, those without a mask as they are.
      masks: the masks of the sparse weights by name (`state_masks`).
      layers: the report that says their axes.
    """
    pattern = parse(pattern)
    axes = {layer.name: layer.axes for layer in layers if layer.axes is not None}
    leaves = {name_of(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}
    for name in masks:
        if name not in leaves or name not in axes:
            raise SparsityError(f"there is a mask for {name!r}, but no such sparse weight")
    arrays, index = {}, {}
    for name, x in leaves.items():
        entry: dict[str, Any] = {"dtype": x.dtype.name}
        if name in masks:
            packed = pack(x, masks[name], pattern, axis=axes[name][1])
            arrays[f"indices:{name}"], x = packed.indices, packed.values
            entry |= {"shape": packed.shape, "axis": packed.axis, "n": packed.n, "m": packed.m}
        # npz knows no bfloat16 or float8: those go as plain integers of their width
        arrays[f"values:{name}"] = x if x.dtype.isbuiltin else x.view(f"u{x.dtype.itemsize}")
        index[name] = entry
    arrays[_INDEX] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix=".jaxonnx-", dir=path.parent) as folder:
        written = Path(folder) / path.name
        with written.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(written, path)


def load(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, Packed]]:
    """The arrays and the packed weights of a file that `save` wrote, both by name.

    Raises:
      SparsityError: the file is truncated, not one of these, or inconsistent.
    """
    try:
        # opened here, because np.load does not close a file that it cannot read
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = dict(file.items())
        index = json.loads(arrays.pop(_INDEX).tobytes())
        dense, packed = {}, {}
        for name, entry in index.items():
            x = arrays.pop(f"values:{name}")
            dtype = jnp.dtype(entry["dtype"])
            x = x if x.dtype == dtype else x.view(dtype)
            if "shape" in entry:
                packed[name] = _checked(name, x, arrays.pop(f"indices:{name}"), entry)
            else:
                dense[name] = x
    except (zipfile.BadZipFile, KeyError, EOFError, TypeError, ValueError, AttributeError) as e:
        if isinstance(e, SparsityError):
            raise
        raise SparsityError(f"{path} is not a packed file, or is damaged: {e!r}") from e
    if arrays:
        raise SparsityError(f"{path} has arrays that its index does not name: {', '.join(arrays)}")
    return dense, packed


def _checked(name: str, values: np.ndarray, indices: np.ndarray, entry: dict) -> Packed:
    packed = Packed(values, indices, tuple(entry["shape"]), entry["axis"], entry["n"], entry["m"])
    shape, axis, n, m = _form(packed)
    parse(f"{n}:{m}")
    moved = [*shape[:axis], *shape[axis + 1 :], shape[axis] // m, n]
    words = -(-int(np.prod(moved)) * _width(m) // 8)
    if list(values.shape) != moved or shape[axis] % m:
        raise SparsityError(f"{name}: values of shape {values.shape} do not fill {list(shape)}")
    if indices.dtype != np.uint8 or indices.shape != (words,):
        raise SparsityError(f"{name}: {indices.size} bytes of indices, not {words}")
    places = np.asarray(_from_bits(jnp.asarray(indices), values.shape, _width(m))).astype(int)
    if (np.diff(places, axis=-1) <= 0).any() or (places >= m).any():
        raise SparsityError(f"{name}: the indices of a group are not {n} different places of {m}")
    return packed

"""Products with matrices that are stored in few bits, of which a few rows at a time become floats.

XLA makes the whole matrix in floating point before a product, and keeps it from the forward pass
for the gradient: for a network in 4 bits that is eight times the memory of its weights. Here a loop
converts a few rows at a time, in the forward pass and again in the gradient by the other factor.
The compiler does not merge what is in two loops.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxonnx._arrays import allow_promotion, lower_fun
from jaxonnx._native import CompilerError, is_split, load_library
from jaxonnx.lowering._stored_array import StoredArray

PART = 1 << 20
"""The bytes of floating point numbers that are converted at a time: they stay in a CPU's cache."""
SMALL = 1 << 16
"""The most bytes, in floating point, of a matrix that is converted as a whole."""


BATCH_AXIS = "data"
"""The axis of a mesh that batches are split over. Weights that are split over it as well (fsdp) are
gathered by a step."""


class Packed(StoredArray):
    """A matrix in few bits, which `unpack(*groups, *shared)` converts; or its transpose.

    `x @ packed` converts a few rows at a time.
    """

    groups: tuple[Any, ...]
    """Arrays whose first axis runs over groups with equal numbers of the matrix's rows."""
    shared: tuple[Any, ...]
    """Arrays that the conversion of every group needs."""
    unpack: Callable[..., Any] = field(metadata={"static": True})
    """A hashable function of some of the groups that returns their rows as a matrix."""
    matrix: jax.ShapeDtypeStruct = field(metadata={"static": True})
    """The shape and dtype of the whole matrix, before `transposed`."""
    transposed: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape[::-1] if self.transposed else self.matrix.shape

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    @property
    def T(self) -> "Packed":
        return replace(self, transposed=not self.transposed)

    def transpose(self, axes: Any = None) -> "Packed":
        return self if axes == [0, 1] else self.T

    def to_array(self) -> Any:
        matrix = self.unpack(*self.groups, *self.shared)
        return matrix.T if self.transposed else matrix

    def squares(self, a: Any, b: Any, axis: int) -> Any:
        """Return the sums of squares of this matrix + a b along an axis, some rows after others."""
        left, right = (b.T, a.T) if self.transposed else (a, b)
        (rows, columns), total = self.matrix.shape, len(self.groups[0])
        most = max(1, PART // max(1, rows * columns // total * self.dtype.itemsize))
        count = max(n for n in range(1, min(most, total) + 1) if total % n == 0)
        down = (axis == 0) != self.transposed

        def sum_part(part: Any) -> Any:
            *groups, factor = part
            matrix = self.unpack(*groups, *self.shared).astype(right.dtype)
            return jnp.square(matrix + factor.reshape(-1, len(right)) @ right).sum(int(not down))

        arrays = [*self.groups, left.reshape(total, -1)]
        parts = [x.reshape(total // count, count, *x.shape[1:]) for x in arrays]
        if not down:
            return lax.map(sum_part, parts).reshape(-1)
        add = lambda sums, part: (sums + sum_part(part), None)  # noqa: E731
        return lax.scan(add, jnp.zeros(columns, right.dtype), parts)[0]

    def __rmatmul__(self, x: Any) -> Any:
        if x.shape[-1] != self.shape[0]:
            raise TypeError(f"shapes {x.shape} and {self.shape} cannot be multiplied")
        # number of devices that a matrix may be split over under the current mesh
        mesh = jax.sharding.get_abstract_mesh()
        apart = math.prod(size for axis, size in mesh.shape.items() if axis != BATCH_AXIS)
        apart = apart if len(self.groups[0]) % apart == 0 else 1
        size, dtype = self.matrix.shape, self.matrix.dtype
        form = _Form(self.unpack, size, dtype, len(self.groups), self.transposed, apart)
        arrays = map(jnp.asarray, (x, *self.groups, *self.shared))
        return packed_product_p.bind(*arrays, form=form)


@dataclass(frozen=True)
class _Form:
    """The static parameters of a product x @ m, or x @ m.T if `transposed`; see `Packed`."""

    unpack: Callable[..., Any]
    size: tuple[int, int]
    dtype: np.dtype
    count: int
    """The number of operands after x that are `groups`; the others are `shared`."""
    transposed: bool
    apart: int = 1
    """The number of equal parts that the groups may be split into over devices."""

    @property
    def adjoint(self) -> "_Form":
        return replace(self, transposed=not self.transposed)

    def dense(self, x, *arrays):
        """Multiply by the whole matrix."""
        matrix = self.unpack(*arrays).astype(x.dtype)
        return x @ (matrix.T if self.transposed else matrix)

    def on_devices(self, x, *arrays):
        """Multiply in parts on each device: a loop over all groups would gather them."""
        count, (rows, columns) = self.apart, self.size
        if count == 1:
            return self.in_parts(x, *arrays)
        part = replace(self, size=(rows // count, columns), apart=1)
        groups = [g.reshape(count, -1, *g.shape[1:]) for g in arrays[: self.count]]
        axes = [*(0 for _ in groups), *(None for _ in arrays[self.count :])]
        if self.transposed:
            y = jax.vmap(part.in_parts, (None, *axes), -2)(x, *groups, *arrays[self.count :])
            return y.reshape(*x.shape[:-1], rows)
        x = x.reshape(*x.shape[:-1], count, rows // count)
        return jax.vmap(part.in_parts, (-2, *axes))(x, *groups, *arrays[self.count :]).sum(0)

    def in_parts(self, x, *arrays):
        """Multiply by a few groups of rows at a time, in a loop."""
        groups, shared = arrays[: self.count], arrays[self.count :]
        rows, columns = self.size
        total = groups[0].shape[0]
        each = rows // total
        size = rows * columns * self.dtype.itemsize
        # never all at once: XLA would keep one conversion for the forward pass and the gradient
        parts = min(total, max(2, -(-size // PART)))
        if size <= SMALL or parts < 2:
            return self.dense(x, *arrays)
        count = -(-total // parts)
        wide = jnp.promote_types(x.dtype, jnp.float32)

        def product(x, start, count):
            """Multiply by the groups from `start` on."""
            part = [lax.dynamic_slice_in_dim(g, start, count) for g in groups]
            if not self.transposed:
                x = lax.dynamic_slice_in_dim(x, start * each, count * each, -1)
            return self.dense(x, *part, *shared)

        def into(y, start, count):
            """Write (transposed) or add the product with the groups from `start` on into y."""
            new = product(x, start, count)
            if not self.transposed:
                return jnp.where(start == 0, new, y + new)
            return lax.dynamic_update_slice_in_dim(y, new, start * each, -1)

        shape = (*x.shape[:-1], rows if self.transposed else columns)
        # of constants XLA:CPU would allocate the results of all products when the program begins
        y = jnp.broadcast_to(x[..., :1].astype(x.dtype if self.transposed else wide), shape)
        y = lax.fori_loop(0, total // count, lambda i, y: into(y, i * count, count), y)
        if rest := total % count:
            y = into(y, total - rest, rest)
        return y.astype(x.dtype)


packed_product_p = Primitive("packed_product")
# the primitive in terms of JAX's own, for readers of a jaxpr
packed_product_p.plain = (  # type: ignore[attr-defined]
    lambda *operands, form: form.dense(*operands)
)
packed_product_p.def_abstract_eval(
    lambda *avals, form: jax.make_jaxpr(allow_promotion(form.dense))(*avals).out_avals[0]
)


@partial(jax.jit, static_argnames="form")
def _compiled(*operands, form):
    return packed_product_p.bind(*operands, form=form)


@packed_product_p.def_impl
def _eager(*operands, form):
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return form.dense(*operands)
    return _compiled(*operands, form=form)


def _jvp(primals, tangents, *, form):
    """Differentiate: the tangent of x is multiplied in parts, that of scales as a whole matrix."""
    (x, *arrays), (dx, *changes) = primals, tangents
    terms = [] if type(dx) is ad.Zero else [packed_product_p.bind(dx, *arrays, form=form)]
    if any(type(change) is not ad.Zero for change in changes):
        changes = [*map(ad.instantiate_zeros, changes)]
        terms.append(jax.jvp(partial(form.dense, x), arrays, changes)[1])
    y = packed_product_p.bind(*primals, form=form)
    return y, sum(terms[1:], terms[0])


def _transpose(cotangent, x, *arrays, form):
    if type(cotangent) is ad.Zero:
        return [None] * (1 + len(arrays))
    dx = packed_product_p.bind(cotangent, *arrays, form=form.adjoint)
    return [dx, *(None for _ in arrays)]


def _batch(operands, axes, *, form):
    x, *arrays = operands
    if all(axis is None for axis in axes[1:]):
        return packed_product_p.bind(jnp.moveaxis(x, axes[0], 0), *arrays, form=form), 0
    return jax.vmap(form.dense, axes)(*operands), 0


ad.primitive_jvps[packed_product_p] = _jvp
ad.primitive_transposes[packed_product_p] = _transpose
batching.primitive_batchers[packed_product_p] = _batch


def _lower_on_cpu(context, *operands, form):
    exported = context.module_context.lowering_parameters.for_export
    x, *_ = context.avals_in
    plain = is_split(context) or exported or not form.transposed
    if plain or len(operands) > 1 + form.count or not is_faster(x, form.unpack, form.size):
        return _lower(context, *operands, form=form)
    fast = lambda x, *groups, form: multiply(x, form.unpack, *groups)  # noqa: E731
    return lower_fun(fast, multiple_results=False)(context, *operands, form=form)


_lower = lower_fun(lambda *operands, form: form.on_devices(*operands), multiple_results=False)
mlir.register_lowering(packed_product_p, _lower)
mlir.register_lowering(packed_product_p, _lower_on_cpu, platform="cpu")


FEW_ROWS = 8
"""The most rows of x. The kernel converts the matrix for each, XLA for all of them once."""
LEAST_WEIGHTS = 1 << 16
"""The fewest weights of a matrix. What runs a small network once need not wait for a compiler."""
_SOURCE = Path(__file__).with_name("few_bits.cc")
_TARGET = "jaxonnx_few_bits_cpu"
_CODES = 32
"""The fewest codes of a block: a vector of low ones, and one of high ones."""


@cache
def _is_ready() -> bool:
    """Compile the kernel and register it with JAX; return whether that is possible."""
    try:
        library = load_library(_SOURCE, [_SOURCE.with_suffix(".inc")])
    except CompilerError:
        return False
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.JaxonnxFewBits), platform="cpu")
    return True


def is_faster(x: Any, unpack: Any, size: tuple[int, int]) -> bool:
    """Check whether the kernel multiplies x by the transpose of a matrix of this size faster.

    It compiles the kernel if so.
    """
    block = getattr(unpack, "block", 0)
    few = x.dtype == np.float32 and 0 < math.prod(x.shape[:-1]) <= FEW_ROWS
    return (
        few
        and block > 0
        and block % _CODES == 0
        and math.prod(size) >= LEAST_WEIGHTS
        and _is_ready()
    )


def multiply(x: Any, unpack: Any, codes: Any, scale: Any, *zeros: Any, variant=-1, threads=0):
    """Multiply x [..., columns] by the transpose of a matrix, by a kernel in C++, `few_bits.cc`.

    XLA converts such a matrix to floats before the product, which takes far longer than the product
    of one row: a token that is generated. The kernel is compiled at the first use; without a
    compiler the plain form of `Packed` runs.

    Args:
      x: float32.
      unpack: has the `block` of a scale, the `middle` code, and `read_zeros`.
      codes, scale, zeros: the groups of a `Packed`.
      variant, threads: as for the kernel of recurrences.
    """
    rows, blocks = scale.shape
    flat = x.reshape(-1, x.shape[-1])
    flat = jnp.pad(flat, ((0, 0), (0, blocks * unpack.block - x.shape[-1])))
    halves = flat.reshape(len(flat), -1, 2).swapaxes(1, 2)
    zero = unpack.read_zeros(scale, *zeros) if zeros else jnp.zeros((0, 0), np.float32)
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((len(flat), rows), np.float32))
    numbers = {"variant": np.int64(variant), "threads": np.int64(threads)}
    operands = halves, codes.reshape(rows, -1), scale.astype(np.float32), zero
    return call(*operands, middle=np.float32(unpack.middle), **numbers).reshape(*x.shape[:-1], rows)

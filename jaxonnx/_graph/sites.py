"""The position of a tensor in a graph, and the other facts that rules of training ask for.

A `Site` is one use of a tensor. Its properties are small pure functions of the use, of the tensor's
numbers and of the graph; each is evaluated when a rule first asks, and once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx._graph.ancestors import ancestors, behind
from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.normalizations import Normalizations
from jaxonnx._graph.uses import Use

ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Sub", "Where")
"""Operators in which a network's own tensors meet data without being declared as weights."""
_DELIMITER = re.compile(r"[./:]")
_SAMPLE = 256
"""The most numbers of a tensor that `Tensor.is_varied` compares."""
_VARIED = 0.75
"""The least share of different numbers in a sample of a learned tensor, also in half precision."""
_COMPARED = 4096
"""The most numbers of a tensor that `Tensor.irregular` compares."""
_ALIKE = 1e-3
"""The relative difference within which the norms of rows of a sinusoidal table agree."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """The numbers of a tensor of the file, or of a value that is computed from such tensors."""

    array: Any
    """Its value, on whatever device."""
    stored: bool
    """Whether it is an initializer, or computed; the others sit in Constant nodes."""

    @cached_property
    def value(self) -> np.ndarray:
        """Its value on the host."""
        return np.asarray(self.array)

    @cached_property
    def long(self) -> tuple[int, ...]:
        """The axes that are longer than one."""
        return tuple(axis for axis, size in enumerate(self.array.shape) if size != 1)

    @cached_property
    def description(self) -> str:
        """The kind of constant that its numbers are known to be; "" for any other."""
        return describe_constant(self.value)

    @cached_property
    def evenly_spaced(self) -> bool:
        """Whether the first numbers are an arithmetic sequence like 0, 1, 2, ...."""
        steps = np.diff(self.value.reshape(-1)[:_COMPARED].astype(np.float64))
        return bool(steps.size and steps[0] != 0 and np.allclose(steps, steps[0]))

    @cached_property
    def irregular(self) -> bool:
        """Whether there are more than two different numbers, and not evenly spaced."""
        several = len(np.unique(self.value.reshape(-1)[:_COMPARED])) > 2
        return several and not self.evenly_spaced

    @cached_property
    def is_varied(self) -> bool:
        """Whether most numbers of a sample differ, as learned and random ones do."""
        flat = self.value.reshape(-1)
        flat = flat[flat != 0] if flat.size > _SAMPLE else flat
        some = flat[np.linspace(0, flat.size - 1, min(flat.size, _SAMPLE)).astype(int)]
        return bool(some.size and len(np.unique(some)) >= _VARIED * some.size)

    @cached_property
    def largest(self) -> float:
        """The greatest magnitude; NaN if any element is NaN."""
        return float(np.abs(self.value.astype(np.float64)).max(initial=0))

    @cached_property
    def rows_have_one_norm(self) -> bool:
        """Whether rows along the first or last long axis have equal norms, but for rows of zeros.

        Tables of sines and cosines of positions do, as sin^2 + cos^2 = 1.
        """
        for axis in (self.long[0], self.long[-1]):
            norms = np.linalg.norm(self.value.astype(np.float64), axis=axis)
            norms = norms[norms > 0]
            if norms.size and np.ptp(norms) <= _ALIKE * norms.max():
                return True
        return False

    @cached_property
    def linear_in_distance(self) -> bool:
        """Whether the different numbers of each head (..., queries, keys) are evenly spaced."""
        heads = self.value.reshape(-1, *self.value.shape[-2:])
        # the first row rules most tables out, without sorting all numbers of all heads
        even = _is_even(heads[0, 0]) and all(_is_even(head) for head in heads)
        return even and len(np.unique(heads[-1])) > 2


def _is_even(numbers: np.ndarray) -> bool:
    """Check whether the different numbers of an array are evenly spaced."""
    steps = np.diff(np.unique(numbers.astype(np.float64)))
    return bool(np.allclose(steps, steps[:1], 1e-3, 1e-6))


@dataclass(eq=False)
class Facts:
    """The graph around its sites; its layers are filled in before a rule asks for them."""

    graph: Graph
    normalized: Normalizations
    norms: frozenset[str]
    """Tensors that meet weights only in the computation of their divisors."""
    layers: set[int] = field(default_factory=set)
    """The indices of the nodes that have weights."""
    weights_stored: bool = False
    """Whether some weights are initializers; then Constant nodes hold none."""

    @cached_property
    def data(self) -> set[str]:
        """The values that depend on the graph's inputs."""
        return behind(self.graph.nodes, self.graph.inputs)

    @cached_property
    def behind_layers(self) -> set[str]:
        """The values that are computed from results of layers."""
        layers = [node for node in self.graph.nodes if node.index in self.layers]
        return behind(self.graph.nodes, (name for node in layers for name in node.outputs))

    @cached_property
    def before_layers(self) -> set[str]:
        """The values that layers are computed from."""
        layers = [node for node in self.graph.nodes if node.index in self.layers]
        return ancestors(self.graph.nodes, (name for node in layers for name in node.reads))

    @cached_property
    def on_inputs(self) -> dict[int, Node]:
        """The nodes with arithmetic of a tensor and an input that met no layer, by index."""
        return {node.index: node for node in self.graph.nodes if self._is_on_input(node)}

    def _is_on_input(self, node: Node) -> bool:
        fed = [name for name in node.inputs if name in self.data]
        plain = node.op.name in ("Add", "Div", "Mul", "Sub") and not node.op.domain
        return plain and len(fed) == 1 and fed[0] not in self.behind_layers

    def readers(self, node: Node, through: Collection[str] = ()) -> Iterator[str]:
        """Yield the operators that read a node's results, behind those in `through`."""
        names = [*node.outputs]
        for name in names:
            for reader in self.graph.readers.get(name, ()):
                if reader.op.name in through:
                    names += reader.outputs
                else:
                    yield reader.op.name


@dataclass(frozen=True, eq=False)
class Site:
    """A use of a tensor, as the rules see it."""

    use: Use
    tensor: Tensor
    facts: Facts
    result_is_trained: bool = False
    """Whether data meets only a value that is computed from the tensor, and that is a weight."""

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.use.name

    @cached_property
    def last_name(self) -> str:
        """The last part of the tensor's name: "running_mean" of "layers.0.bn.running_mean"."""
        return _DELIMITER.split(self.name.removesuffix(":0"))[-1]

    @property
    def node(self) -> Node:
        """The node that reads the tensor."""
        return self.use.node

    @cached_property
    def operator(self) -> str:
        """The name of the node's operator in ONNX's own domain; "" in other domains."""
        return "" if self.node.op.domain else self.node.op.name

    @cached_property
    def role(self) -> str | None:
        """The role that the operator declares for this input: "param", "vector" or "state"."""
        return self.node.op.role(self.use.position)

    @property
    def in_main_graph(self) -> bool:
        """Whether the node is in the main graph, in no subgraph and no function."""
        return self.node is self.use.outer

    @property
    def others(self) -> list[str]:
        """The other inputs of the node."""
        return [name for i, name in enumerate(self.node.inputs) if i != self.use.position]

    @cached_property
    def meets_data(self) -> bool:
        """Whether the tensor is an operand of arithmetic with values that depend on inputs."""
        arithmetic = self.in_main_graph and self.operator in ARITHMETIC
        return arithmetic and not self.facts.data.isdisjoint(self.others)

    @property
    def meets_only_tensors(self) -> bool:
        """Whether the node computes with tensors only."""
        return self.in_main_graph and self.facts.data.isdisjoint(self.node.reads)

    @property
    def meets_no_data(self) -> bool:
        """Whether the node computes with tensors only, and declares no weight here."""
        return self.role in (None, "vector") and self.facts.data.isdisjoint(self.node.reads)

    @property
    def is_outer_factor(self) -> bool:
        """Whether a product repeats the tensor along the axis that it sums over."""
        form = self.node.op.form(self.use.position)
        return self.use.view.expanded and form is not None and not self.use.is_summed

    @property
    def is_declared_weight(self) -> bool:
        """Whether the operator declares a weight here, whose numbers are no known constant."""
        weight = self.role == "param" and self.tensor.array.size > 1
        return weight and not self.is_outer_factor and not self.tensor.description

    @property
    def is_vector(self) -> bool:
        """Whether exactly one axis is longer than one."""
        return len(self.tensor.long) == 1

    @property
    def is_table(self) -> bool:
        """Whether several axes are longer than one."""
        return len(self.tensor.long) > 1


_LEAST = 4
"""The fewest numbers that a geometric sequence or a window is known by."""
_SPACED = 32
"""The fewest numbers of an arithmetic sequence: short ones are what people write into tests."""
_MOST = 2**16
"""The most numbers; longer vectors are not looked at."""
_LARGEST = 2**26
"""The most numbers of a matrix that is looked at."""
_CLOSE = 1e-3
"""The relative difference that float16 may make."""

_WINDOWS: tuple[Callable[[int], np.ndarray], ...] = (
    lambda n: np.hanning(n + 2)[1:-1],
    lambda n: np.hanning(n + 2)[1:-1] ** 0.5,
    lambda n: np.hanning(n + 2)[1:-1] ** 0.85,  # Povey
    np.hamming,
    lambda n: np.hamming(n + 1)[:-1],
    lambda n: np.blackman(n + 2)[1:-1],
)
"""Windows of n numbers without zeros at their ends, which periodic ones and padding add."""

_ROWS = 16
"""The rows of a matrix that are looked at first, and the fewest numbers that a row is known by."""
_SHORT = 5
"""The fewest numbers that a sinusoid is known by, exactly."""
_BANDS = 8
"""The fewest bands of a bank."""
_PEAK = 0.99
"""The share of a row's energy about its greatest frequency, if it is a sinusoid."""


def describe_constant(value: Any) -> str:
    """Recognize a well-known constant by its values; return its description, or "".

    Vectors (one axis longer than 1): windows (Hann, Hamming, Blackman, Gauss, Povey; symmetric or
    periodic, padded or not), geometric sequences (the frequencies of rotary embeddings, `inv_freq`;
    the slopes of ALiBi), and arithmetic sequences.
    Matrices (two such axes): rows that are sinusoids (bases of Fourier and cosine transforms, also
    windowed; tables of positions), and filter banks (nonnegative bands in order).
    Kernels (more axes): filters that are even or odd along each axis, such as blurs and Sobel's.
    """
    value = np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return ""
    long = [n for n in value.shape if n != 1]
    if len(long) == 1 and _LEAST <= long[0] <= _MOST:
        ulp = float(jnp.finfo(value.dtype).eps)
        vector = value.reshape(-1).astype(np.float64)
        if not np.isfinite(vector).all():
            return ""
        if _is_geometric(vector):
            return "a geometric sequence"
        if len(vector) >= _SPACED and _is_arithmetic(vector, ulp * np.abs(vector).max()):
            return "an arithmetic sequence"
        # windows may be padded with zeros, and periodic ones begin with one
        inner = np.flatnonzero(np.abs(vector) > _CLOSE**2)
        core = vector[inner[0] : inner[-1] + 1] if len(inner) else vector[:0]
        if len(core) < _LEAST - 1 or not (core > 0).all():
            return ""
        listed = any(np.allclose(core, window(len(core)), 0, _CLOSE / 4) for window in _WINDOWS)
        return "a window" if listed or _is_gaussian(core) else ""
    if len(long) == 2 and min(long) >= _LEAST and value.size <= _LARGEST:
        matrix = value.reshape(long)
        for rows in (matrix, matrix.T):
            if _are_sinusoids(rows):
                return "rows of sinusoids"
            if _is_bank(rows):
                return "a bank of filters"
        return ""
    if value.ndim > 2 and value.size <= _LARGEST and _are_mirrored(value):
        return "kernels with mirror symmetry"
    return ""


def _are_mirrored(value: np.ndarray) -> bool:
    """Check whether kernels (outputs, inputs, *sizes) are even or odd along each axis.

    At least one must not be constant or have a single number, as others are even by themselves.
    """
    kernels = value.reshape(value.shape[0] * value.shape[1], *value.shape[2:])
    # the first kernel decides for most weights, without a float64 copy of all of them
    first = kernels[:1].astype(np.float64)
    if first.size < _LEAST - 1 or not np.isfinite(first).all() or not _mirror(first):
        return False
    kernels = kernels.astype(np.float64)
    if not np.isfinite(kernels).all() or not _mirror(kernels):
        return False
    flat = kernels.reshape(len(kernels), -1)
    return bool(((np.ptp(flat, 1) > 0) & (np.count_nonzero(flat, 1) > 1)).any())


def _mirror(kernels: np.ndarray) -> bool:
    """Check whether each kernel (kernels, *sizes) is even or odd along each axis."""
    near = _CLOSE**2 * np.abs(kernels).max()
    for axis in range(1, kernels.ndim):
        flipped = np.flip(kernels, axis)
        other = [*range(1, kernels.ndim)]
        even = np.abs(kernels - flipped).max(tuple(other))
        antisymmetric = np.abs(kernels + flipped).max(tuple(other))
        if not (np.minimum(even, antisymmetric) <= near).all():
            return False
    return True


def _is_geometric(vector: np.ndarray) -> bool:
    """Check whether each number is the one before it times the same factor, which is not one."""
    if not (vector > 0).all():
        return False
    steps = np.diff(np.log(vector))
    return bool(abs(steps[0]) > _CLOSE and np.allclose(steps, steps[0], _CLOSE, _CLOSE / 4))


def _is_arithmetic(vector: np.ndarray, rounding: float) -> bool:
    """Check whether each number is the one before it plus the same step, but for rounding."""
    line = np.linspace(vector[0], vector[-1], len(vector))
    step = abs(line[1] - line[0])
    return bool(step > 2 * rounding and np.abs(vector - line).max() <= step / 100 + rounding)


def _is_gaussian(vector: np.ndarray) -> bool:
    """Check whether the logarithm is a parabola that opens downwards, with its top inside."""
    if len(vector) < 2 * _LEAST or vector.min() < _CLOSE**3 * vector.max():
        return False  # the logarithms of very small numbers would dominate the fit
    place = np.arange(len(vector)) - (len(vector) - 1) / 2
    fit = np.polyfit(place, np.log(vector), 2, w=vector)
    inside = fit[0] < 0 and abs(fit[1] / (2 * fit[0])) < len(vector) / 4
    error = np.abs(np.exp(np.polyval(fit, place)) - vector).max()
    return bool(inside and error < _CLOSE / 4 * vector.max() and vector.min() < vector.max() / 2)


def _sample(rows: np.ndarray) -> np.ndarray:
    """Return at most `_ROWS` rows, evenly spread, in float64; they rule most weights out."""
    places = np.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).astype(int)
    return rows[places].astype(np.float64)


def _are_sinusoids(rows: np.ndarray) -> bool:
    """Check whether each row that is not zero is a sinusoid, possibly under a window.

    The energy of a sinusoid lies at one frequency of its Fourier transform: without a window for
    whole periods, with a Hann window for others. At least two rows must oscillate.
    """
    if rows.shape[1] < _ROWS:
        return _recur(rows.astype(np.float64))
    if not _have_single_frequencies(_sample(rows)):
        return False
    return len(rows) <= _ROWS or _have_single_frequencies(rows.astype(np.float64))


def _recur(rows: np.ndarray) -> bool:
    """Check whether short rows are sinusoids: x[n - 1] + x[n + 1] = 2 cos(w) x[n].

    At least half of them must have a factor below 2, since straight lines satisfy it with w = 0.
    """
    top = np.abs(rows).max()
    if rows.shape[1] < _SHORT or len(rows) < _SHORT - 1 or not 0 < top < np.inf:
        return False
    middle, ends = rows[:, 1:-1], rows[:, :-2] + rows[:, 2:]
    factors = (middle * ends).sum(1) / np.maximum((middle**2).sum(1), 1e-300)
    exact = np.abs(ends - factors[:, None] * middle).max() <= _CLOSE * top
    return bool(exact and 2 * (np.abs(factors) < 2 - _CLOSE).sum() >= len(rows))


def _have_single_frequencies(rows: np.ndarray) -> bool:
    """Check whether the energy of each row lies within two bins of its strongest frequency."""
    tops = np.abs(rows).max(1, keepdims=True)
    rows = (rows / np.maximum(tops, 1e-300))[tops[:, 0] > _CLOSE * tops.max()]
    if len(rows) < 2 or not np.isfinite(rows).all():
        return False
    length = rows.shape[1]
    best, places = np.zeros(len(rows)), np.zeros(len(rows), int)
    for window in (np.ones(length), np.hanning(length + 2)[1:-1]):
        energy = np.abs(np.fft.rfft(rows * window)) ** 2
        place = energy.argmax(1)
        nearby = np.abs(np.arange(energy.shape[1]) - place[:, None]) <= 2
        share = (energy * nearby).sum(1) / energy.sum(1)
        places = np.where(share > best, place, places)
        best = np.maximum(best, share)
    return bool((best > _PEAK).all() and (places > 2).sum() >= 2)


def _is_bank(rows: np.ndarray) -> bool:
    """Check whether rows are the bands of a filter bank.

    Bands are nonnegative and contiguous, and start and end in ascending order. At least a quarter
    of them have several numbers (an identity matrix does not), and at most three fifths of all
    numbers are not zero.
    """
    some = _sample(rows)
    if not some.any() or not (some >= 0).all() or 5 * np.count_nonzero(some) > 3 * some.size:
        return False
    rows = rows.astype(np.float64)
    rows = rows[np.abs(rows).max(1) > 0]
    if len(rows) < _BANDS or not (rows >= 0).all() or not np.isfinite(rows).all():
        return False
    full = rows > 0
    starts, counts = full.argmax(1), full.sum(1)
    ends = rows.shape[1] - full[:, ::-1].argmax(1)
    whole = (ends - starts == counts).all() and (counts.mean() <= 0.6 * rows.shape[1])
    ordered = (np.diff(starts) >= 0).all() and (np.diff(ends) >= 0).all() and ends[-1] > ends[0]
    return bool(whole and ordered and 4 * (counts > 1).sum() >= len(rows))

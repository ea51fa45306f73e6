"""Errors of single tensors (`sensitivity`), and types that are chosen by them (`max_loss`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxonnx._display import new_axes
from jaxonnx._io.protos import Editor
from jaxonnx._rewrite.network import Network, reenter, with_file, with_tensors
from jaxonnx.errors import InputError
from jaxonnx.ops.contrib.moving_ranges import DOMAIN
from jaxonnx.quantization._calibration import find_token_axes, observe
from jaxonnx.quantization._insert import fold_normalizations, insert, select_reads
from jaxonnx.quantization._scheme import (
    TYPES,
    Quantization,
    WeightSite,
    divides,
    find_origin,
    find_ranges,
    spread_scale,
    weight_parameters,
)
from jaxonnx.quantization._sites import find_sites, find_wrong_int2, value_types, with_weights
from jaxonnx.quantization._view import Rounding

Changes = Mapping[str, Any] | None
"""New values of parameters and state by name; None for a pattern that does not fit."""


class Trial(NamedTuple):
    """A choice of types that `jaxonnx.quantize(max_loss=)` evaluated."""

    loss: float
    """The loss relative to floating point, in units of the metric."""
    size: int
    """The bytes of the weights, and of the activations of one example."""
    wider_types: Mapping[str, str | None]
    """The tensors with other types than the narrowest; None is floating point."""


@dataclass(frozen=True)
class Sensitivity:
    """The error that each tensor causes when only it is quantized; prints as a table, largest
    first.

    Attributes:
      errors: by name of the weight or activation, then by dtype or pattern: the mean squared change
        of the outputs, divided by their mean square.
      sizes: the number of elements of each weight, and of each activation for one example.
      trials: what `jaxonnx.quantize(max_loss=)` evaluated, in order; the last one is its result.
    """

    errors: Mapping[str, Mapping[str, float]]
    sizes: Mapping[str, int]
    trials: Sequence[Trial] = field(default=(), kw_only=True)

    @property
    def types(self) -> tuple[str, ...]:
        """The dtypes and patterns that were measured."""
        return tuple(dict.fromkeys(kind for row in self.errors.values() for kind in row))

    @property
    def ranking(self) -> list[str]:
        """The names of the tensors, sorted by their largest error, in descending order."""
        return sorted(self.errors, key=lambda n: -max(self.errors[n].values(), default=0))

    @property
    def wider_types(self) -> dict[str, str]:
        """The types of the tensors that the last trial gives more bits."""
        return (
            {n: t or "float32" for n, t in self.trials[-1].wider_types.items()}
            if self.trials
            else {}
        )

    def __str__(self) -> str:
        def show(name: str, kind: str) -> str:
            return f"{self.errors[name][kind]:.2e}" if kind in self.errors[name] else ""

        rows = [
            (name, f"{self.sizes[name]:,}", *(show(name, kind) for kind in self.types))
            for name in self.ranking
        ]
        head: tuple[str, ...] = "weight", "size", *self.types
        if not self.trials:
            return _align([head, *rows])
        rows = [(*row, self.wider_types.get(row[0], "")) for row in rows]
        tried = [
            (f"{i}", f"{x.loss:.4g}", f"{x.size:,}", f"{len(x.wider_types)} of {len(rows)}")
            for i, x in enumerate(self.trials, 1)
        ]
        tables = (
            [("tensor", *head[1:], "result"), *rows],
            [("trial", "loss", "bytes", "wider"), *tried],
        )
        return "\n\n".join(map(_align, tables))

    def plot(self, axes: Any = None) -> Any:
        """Draw a bar for each tensor and dtype, on a log axis; return the matplotlib axes."""
        axes = new_axes(axes)
        names, height = [*self.errors], 0.8 / len(self.types)
        places = np.arange(len(names))
        for k, kind in enumerate(self.types):
            measured = [self.errors[name].get(kind, np.nan) for name in names]
            values = [max(e, 1e-12) if np.isfinite(e) else np.nan for e in measured]
            axes.barh(places + k * height, values, height, label=kind)
        labels = [f"{n}: {self.wider_types[n]}" if n in self.wider_types else n for n in names]
        axes.set_yticks(places + 0.4 - height / 2, labels)
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="relative squared change of the outputs")
        axes.legend()
        return axes


def _align(table: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    return "\n".join(lines)


def output_error(model: Network, examples: Sequence[Sequence[Any]]) -> Callable[[Network], float]:
    """Return the squared change of the outputs of another network divided by their squares.

    Args:
      model: the network to compare with.
      examples: batches of inputs, in the order of the model's. Padding does not count.
    """
    names = [value.name for value in model.inputs]
    tokens = find_token_axes(model, model.graph.outputs, examples)

    def evaluate(network: Network, inputs: Sequence[Any]) -> list[Any]:
        feed = dict(zip(names, map(jnp.asarray, inputs), strict=True))
        outputs = network.program(network.params, network.state, None, feed)
        return [
            jnp.where(tokens[name].find_tokens(feed, y.ndim), y, 0) if name in tokens else y
            for name, y in zip(model.graph.outputs, outputs, strict=True)
            if jnp.issubdtype(y.dtype, jnp.floating)
        ]

    exact = [evaluate(model, inputs) for inputs in examples]
    size = sum(float(jnp.square(y).sum()) for outputs in exact for y in outputs)

    def error(network: Network) -> float:
        changed = sum(
            float(jnp.square(a - b).sum())
            for inputs, expected in zip(examples, exact, strict=True)
            for a, b in zip(evaluate(network, inputs), expected, strict=True)
        )
        return changed / max(size, float(np.finfo(np.float32).tiny))

    return error


def measure(
    model: Network,
    kinds: Mapping[str, Sequence[str | None]],
    change: Callable[[str, str], Changes],
    examples: Sequence[Sequence[Any]],
) -> dict[str, dict[str, float]]:
    """Measure the change of the outputs when one tensor at a time is rounded or made sparse.

    Args:
      model: the network in floating point.
      kinds: the types or patterns to try, by the name of the tensor; None is left out.
      change: from a name and a type to the new tensors.
      examples: batches of inputs, in the order of the model's.

    Returns:
      For each tensor and type the squared change of the outputs divided by their squares.
    """
    error = output_error(model, examples)
    result: dict[str, dict[str, float]] = {name: {} for name in kinds}
    for name, tried in kinds.items():
        for kind in filter(None, tried):
            new = change(name, kind)
            result[name][kind] = np.inf if new is None else error(with_tensors(model, new))
    return result


def round_weight(
    model: Network,
    sites: Mapping[str, WeightSite],
    schemes: Mapping[str, Quantization | None],
    name: str,
    kind: str,
) -> Changes:
    """Round a weight by a scheme, or prune it to the pattern `kind` if there is no scheme.

    Returns:
      The weight by its name, float32; None if its shape does not fit the pattern.
    """
    w, site, scheme = np.asarray(model.tensors[name]), sites[name], schemes[kind]
    if scheme is None:
        from jaxonnx import sparse

        pattern, axes = sparse.parse(kind, True), (site.output, site.input)
        if pattern.misfit(w.shape, axes):
            return None
        return {name: np.where(sparse.mask(w, pattern, axes=axes), w, 0)}
    number = TYPES[scheme.weights]
    scale = spread_scale(weight_parameters(w, site, scheme), w)
    rounded = number.round(w / scale + number.middle) - number.middle
    return {name: (rounded * scale).astype(np.float32)}


Ladders = Mapping[str, Sequence[str | None]]
"""The types of each tensor that are chosen among, from the narrowest. None is float32."""


def bytes_of(kind: str | None, elements: int) -> float:
    """Return the bytes that elements of a type take; those of None are float32."""
    return elements * (TYPES[kind].bits if kind else 32) / 8


def rank_steps(
    errors: Mapping[str, Mapping[str, float]], ladders: Ladders, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str | None]]:
    """Yield steps of a tensor to its next wider type, until all have their widest.

    All tensors start in their narrowest type. The next step is that which saves most error for each
    byte that it adds.

    Args:
      errors: of each tensor by type, from `measure`.
      ladders: the types of each tensor.
      sizes: the number of elements of each tensor.

    Yields:
      The tensor, and its next type.
    """

    def gain(name: str, i: int) -> float:
        """Return the error that the step from type i saves for each byte."""
        now, after = ladders[name][i : i + 2]
        cost = bytes_of(after, sizes[name]) - bytes_of(now, sizes[name])
        better = errors[name][str(now)] - (errors[name][after] if after else 0.0)
        return better / max(cost, 1e-9)

    place = dict.fromkeys(ladders, 0)
    while open_ := {n: gain(n, i) for n, i in place.items() if i + 1 < len(ladders[n])}:
        name = max(open_, key=lambda n: open_[n])
        place[name] += 1
        yield name, ladders[name][place[name]]


@dataclass(frozen=True)
class Trials:
    """A network with a RoundTo node for each activation, which rounds to the levels in its state.

    Attributes:
      network: the network, in which nothing is rounded.
      sites: its weights.
      schemes: the scheme of each type of weights; None for sparsity patterns.
      levels: of the activations that have a range, by type: new state for the RoundTo nodes.
      sizes: the number of elements of each weight, and of each activation for one example.
      factors: for matrices of MatMul and Gemm the activation that they are multiplied by.
    """

    network: Network
    sites: Mapping[str, WeightSite]
    schemes: Mapping[str, Quantization | None]
    levels: Mapping[str, Mapping[str, Mapping[str, Any]]]
    sizes: Mapping[str, int]
    factors: Mapping[str, str] = field(default_factory=dict)

    def change(self, name: str, kind: str) -> Changes:
        """Return the new tensors that round a weight or an activation to a type."""
        if name in self.levels:
            return self.levels[name][kind]
        return round_weight(self.network, self.sites, self.schemes, name, kind)

    def round(self, types: Mapping[str, str | None]) -> Network:
        """Return the network with tensors of these types; None is floating point."""
        changes = [self.change(name, kind) or {} for name, kind in types.items() if kind]
        return with_tensors(self.network, {n: x for part in changes for n, x in part.items()})


def make_trials(
    model: Network,
    scheme: Quantization,
    schemes: Mapping[str, Quantization | None],
    activations: Sequence[str],
    examples: Sequence[Sequence[Any]],
) -> Trials:
    """Measure the ranges of a network and give it RoundTo nodes.

    Args:
      model: a network in floating point. If its caches are empty, they are so in the result.
      scheme: the types to round to, and the method of ranges.
      schemes: the scheme of each type of weights; None for sparsity patterns.
      activations: the types of activations.
      examples: calibration data, batches of inputs in the order of the model's.
    """
    sites = find_sites(model, partial(value_types, model, examples[0]), scheme)
    weights, tensors = sites.weights, model.tensors
    sizes = {name: int(tensors[name].size) for name in weights}
    if not activations:
        return Trials(model, weights, schemes, {}, sizes)
    observed = observe(model, sites.range_names, examples)
    ranges = {
        kind: find_ranges(observed, sites.shared, replace(scheme, activations=kind), {}).ranges
        for kind in activations
    }
    rounded = ranges[activations[0]]
    reads, file = select_reads(sites, rounded), Editor(model.proto, tensors)
    names = {
        n: (file.unused_name(f"{n}_levels"), file.unused_name(f"{n}_rounded")) for n in rounded
    }
    for node in file.graph.node:
        for i, name in enumerate(node.input):
            if node.output and reads.get((node.output[0], i)) == name:
                node.input[i] = names[name][1]
    for value, (limits, output) in names.items():
        file.add_tensor(limits, np.zeros(4, np.float32))
        file.add_node("RoundTo", [value, limits], output, f"{value}_RoundTo", domain=DOMAIN)
    file.proto.opset_import.add(domain=DOMAIN, version=1)
    groups: dict[str, list[str]] = {}
    for value in rounded:
        groups.setdefault(find_origin(value, sites.shared), []).append(value)
    # scale, zero point, and the least and greatest integer of each range, float32 [4]
    ends = {kind.dtype: kind.limits for kind in reversed(TYPES.values())}
    levels: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for origin, values in groups.items():
        levels[origin] = {}
        for kind in activations:
            levels[origin][kind] = {}
            for value in values:
                scale, point, *_ = ranges[kind][value]
                numbers = [scale, float(point), *ends[point.dtype]]
                levels[origin][kind][names[value][0]] = np.array(numbers, np.float32)
    batch = max(len(x) for x in examples[0] if np.ndim(x))
    sizes |= {n: -(-observed.sizes[n] // batch) for n in levels}
    network = reenter(with_file(model, file.finish(), state=file.added), model)
    factors = {
        node.inputs[1]: find_origin(node.inputs[0], sites.shared)
        for node in model.graph.nodes
        if node.op.name in ("Gemm", "MatMul") and node.inputs[1] in weights
        if node.inputs[0] in rounded
    }
    return Trials(network, weights, schemes, levels, sizes, factors)


N = TypeVar("N", bound=Network)
Types = Mapping[str, str | None]

_MEASURED = 4
"""The batches that the errors of single tensors are measured on."""


class Bound(NamedTuple):
    """A limit of the loss by quantization."""

    most: float
    evaluate: Callable[[Any], float]
    """The metric of a network on the validation data, where greater is worse."""
    name: str
    """Of the metric."""


def insert_within(
    model: N,
    scheme: Quantization,
    examples: Sequence[Sequence[Any]],
    method: str | None,
    bound: Bound,
    *,
    keep_norms: bool,
) -> N:
    """Quantize a network as `insert` does, and keep tensors in more bits until a bound is met.

    All tensors start in the types of the scheme. Weights that onnxruntime cannot have in int2, and
    those whose inputs blocks do not divide, start in the next type that they can have. Steps to
    wider types are ranked by the error that they save for each byte; a bisection finds how many are
    needed, and those that turn out not to be are taken back. Each choice is evaluated on the
    validation data, the last ones as the network that is saved.

    Returns:
      The quantized network, whose `Rounding` has the errors and the choices (`Sensitivity`).

    Raises:
      InputError: the bound is met in floating point only.
    """
    folded = reenter(fold_normalizations(model), model)
    # 1. the types of each tensor, from the narrowest
    plain = with_weights(scheme, scheme.weights)
    weights = [scheme.weights, *["int8"] * (TYPES[scheme.weights].bits < 8)]
    activations = [scheme.activations] if scheme.activations else []
    if scheme.dialect != "tensorrt":
        weights += ["int16"] * (scheme.dialect == "onnxruntime")
        activations += [kind for kind in (f"{x[:-1]}16" for x in activations) if kind in TYPES]
    schemes = {kind: with_weights(plain, kind) for kind in dict.fromkeys(weights)}
    trials = make_trials(folded, plain, schemes, activations, examples)
    wrong = {"int2": find_wrong_int2(folded.graph, folded.tensors, trials.sites, scheme.block)}
    ladders = {
        name: (
            *(
                kind
                for kind, each in schemes.items()
                if name not in wrong.get(kind, ()) and divides(folded.tensors[name], site, each)
            ),
            None,
        )
        for name, site in trials.sites.items()
    }
    ladders |= dict.fromkeys(trials.levels, (*dict.fromkeys(activations), None))
    # 2. the errors of single tensors, and the metric in floating point
    errors = measure(trials.network, ladders, trials.change, examples[:_MEASURED])
    search = _Search(trials, ladders, errors, bound, bound.evaluate(trials.network))
    # 3. the narrowest choice that meets the bound when it is inserted
    for types in search.choose(bound.most):
        if not any(types[name] for name in search.trials.sites):
            break
        net = insert(model, scheme, examples, method, keep_norms=keep_norms, types=types)
        if search.try_network(reenter(net, model), types) <= bound.most:
            (rounding,) = (v for v in net.program.views if isinstance(v, Rounding))
            program = net.program.leave(Rounding).enter(replace(rounding, report=search.report))
            return replace(net, program=program)
    count, (*trials, last) = len(search.ladders), sorted(search.tried, key=lambda trial: trial.size)
    best = min((t for t in trials if t.size < last.size), key=lambda trial: trial.loss)
    raise InputError(
        f"max_loss={bound.most:g} of {bound.name} is met in floating point only. The best choice "
        f"that was tried loses {best.loss:.4g}, with {len(best.wider_types)} of {count} tensors in "
        "more bits. Pass a larger max_loss, or train with quantize= to recover it\n\n"
        f"{search.report}"
    )


@dataclass
class _Search:
    """The choices of types that were evaluated, and those that are left.

    Attributes:
      trials: evaluates choices without compiling anew.
      ladders: the types of each tensor.
      errors: of each tensor by type.
      bound: the metric.
      exact: its value in floating point.
      tried: the choices that were evaluated.
    """

    trials: Trials
    ladders: Ladders
    errors: Mapping[str, Mapping[str, float]]
    bound: Bound
    exact: float
    tried: list[Trial] = field(default_factory=list)

    @property
    def report(self) -> Sensitivity:
        return Sensitivity(self.errors, self.trials.sizes, trials=tuple(self.tried))

    def complete(self, types: Types) -> dict[str, str | None]:
        """Give 16 bits to the matrices whose factors have more bits than the scheme's.

        Of floats and a matrix in 8 bits or fewer onnxruntime (1.32) makes MatMulNBits, which rounds
        the floats to int8 by default.
        """
        wider = {
            weight: "int16"
            for weight, value in self.trials.factors.items()
            if types[value] != self.ladders[value][0] and "int16" in self.ladders[weight]
            if (kind := types[weight]) is not None and TYPES[kind].bits < 16
        }
        return {**types, **wider}

    def choose(self, most: float) -> Iterator[dict[str, str | None]]:
        """Yield choices of types, the narrowest that meets the bound first."""
        steps = [*rank_steps(self.errors, self.ladders, self.trials.sizes)]
        narrow = {name: ladder[0] for name, ladder in self.ladders.items()}
        # the least number of steps that meets the bound: `low` does not, `high` does
        low, high = -1, len(steps)
        middle = 0
        while low + 1 < high:
            meets = self.try_types(narrow | dict(steps[:middle])) <= most
            low, high = (low, middle) if meets else (middle, high)
            middle = (low + high) // 2
        types = narrow | dict(steps[:high])
        needed = set()
        for name, _ in reversed(steps[:high]):  # the steps that save least come first
            ladder = self.ladders[name]
            place = ladder.index(types[name])
            fewer = types | {name: ladder[place - 1]}
            if name not in needed and self.try_types(fewer) <= most:
                types = fewer
            else:
                needed.add(name)
        yield self.complete(types)
        # the saved network may lose a little more than the trial, as its biases are rounded
        while high < len(steps):
            high += -(-(len(steps) - high) // 4)
            yield self.complete(narrow | dict(steps[:high]))

    def try_types(self, types: Types) -> float:
        """Evaluate the trial network with these types; return its loss by quantization."""
        types = self.complete(types)
        return self.try_network(self.trials.round(types), types)

    def try_network(self, network: Network, types: Types) -> float:
        """Evaluate a network of these types, record it, and return its loss."""
        loss = self.bound.evaluate(network) - self.exact
        sizes = self.trials.sizes
        size = round(sum(bytes_of(kind, sizes[name]) for name, kind in types.items()))
        wider_types = {n: kind for n, kind in types.items() if kind != self.ladders[n][0]}
        self.tried.append(Trial(loss, size, wider_types))
        return loss if loss == loss else float("inf")

"""Quantize a network such that a metric loses no more than a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from jaxonnx._rewrite.network import Network, reenter
from jaxonnx.errors import InputError
from jaxonnx.quantization._insert import fold_normalizations, insert
from jaxonnx.quantization._open import Rounding
from jaxonnx.quantization._ranges import divides
from jaxonnx.quantization._scheme import TYPES, Quantization, with_weights
from jaxonnx.quantization._sensitivity import (
    Ladders,
    Sensitivity,
    Trial,
    bytes_of,
    measure,
    rank_steps,
)
from jaxonnx.quantization._sites import find_wrong_int2
from jaxonnx.quantization._trials import Trials, make_trials

N = TypeVar("N", bound=Network)
Types = Mapping[str, str | None]

_MEASURED = 4
"""The batches that the errors of single tensors are measured on."""


class Bound(NamedTuple):
    """A limit of what quantization may lose."""

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
    keep_norms: bool = False,
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
    search = _start(folded, scheme, examples, bound)
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
        """Evaluate the trial network with these types; return what it loses."""
        types = self.complete(types)
        return self.try_network(self.trials.round(types), types)

    def try_network(self, network: Network, types: Types) -> float:
        """Evaluate a network of these types, record it, and return what it loses."""
        loss = self.bound.evaluate(network) - self.exact
        sizes = self.trials.sizes
        size = round(sum(bytes_of(kind, sizes[name]) for name, kind in types.items()))
        wider_types = {n: kind for n, kind in types.items() if kind != self.ladders[n][0]}
        self.tried.append(Trial(loss, size, wider_types))
        return loss if loss == loss else float("inf")


def _start(
    model: Network, scheme: Quantization, examples: Sequence[Sequence[Any]], bound: Bound
) -> _Search:
    """Measure the errors of single tensors and the metric in floating point."""
    scheme = with_weights(scheme, scheme.weights)
    weights = [scheme.weights, *["int8"] * (TYPES[scheme.weights].bits < 8)]
    activations = [scheme.activations] if scheme.activations else []
    if scheme.dialect != "tensorrt":
        weights += ["int16"] * (scheme.dialect == "onnxruntime")
        activations += [kind for kind in (f"{x[:-1]}16" for x in activations) if kind in TYPES]
    schemes = {kind: with_weights(scheme, kind) for kind in dict.fromkeys(weights)}
    trials = make_trials(model, scheme, schemes, activations, examples)
    wrong = {"int2": find_wrong_int2(model.graph, model.tensors, trials.sites, scheme.block)}
    ladders = {
        name: (
            *(
                kind
                for kind, each in schemes.items()
                if name not in wrong.get(kind, ()) and divides(model.tensors[name], site, each)
            ),
            None,
        )
        for name, site in trials.sites.items()
    }
    ladders |= dict.fromkeys(trials.levels, (*dict.fromkeys(activations), None))
    errors = measure(trials.network, ladders, trials.change, examples[:_MEASURED])
    return _Search(trials, ladders, errors, bound, bound.evaluate(trials.network))

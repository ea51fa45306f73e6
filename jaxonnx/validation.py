"""`validate`: checks of a model against onnxruntime on the machine at hand, as one table."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import ModelProto
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxonnx._compare import (
    INSTALL,
    Difference,
    Session,
    compare_arrays,
    compare_integers,
    find_integers,
    has_onnxruntime,
    largest,
)
from jaxonnx._compare.written import (
    QUANTIZED,
    Origin,
    find_excess,
    find_fault,
    make_origin,
    name_difference,
    run_session,
)
from jaxonnx._data.kinds import open_data
from jaxonnx._data.random_inputs import draw_inputs, find_sizes
from jaxonnx._display import Printable, format_count, list_some
from jaxonnx._io.formats import read
from jaxonnx._io.protos import all_nodes, tensor_of_constant
from jaxonnx._io.save import training_nodes
from jaxonnx._require import check_arguments
from jaxonnx.errors import Error, InputError, ModelError, SparsityError
from jaxonnx.model import Model, as_model, load, read_inputs
from jaxonnx.quantization import is_quantized

_TRAINING = ("BatchNormalization", "Dropout")
"""Operators that `save` writes in inference form."""


def find_changes(before: str | Path | bytes | ModelProto, after: Any) -> list[str]:
    """Describe the differences between a file and the same file, saved; none, if all bits are kept.

    A tensor of a Constant node may have become an initializer of its name.
    """
    (old, tensors, _), (new, saved, _) = read(before), read(after)
    changes = []
    for name, array in tensors.items():
        other = saved.get(name)
        if other is None:
            changes.append(f"tensor '{name}' is missing")
        elif (other.dtype, other.shape) != (array.dtype, array.shape):
            changes.append(f"tensor '{name}' has another type or shape")
        elif other.tobytes() != array.tobytes():
            changes.append(f"tensor '{name}' has other bits")
    if other := Counter(_plain_nodes(old)) - Counter(_plain_nodes(new)):
        changes += [f"a node {kind} is missing or changed" for kind, *_ in other]
    return changes


def _plain_nodes(proto: ModelProto) -> Iterator[tuple]:
    for node in all_nodes(proto.graph):
        if tensor_of_constant(node) is None and node.op_type not in ("Identity", *_TRAINING):
            attributes = sorted(
                a.SerializeToString() for a in node.attribute if not a.HasField("g")
            )
            yield node.op_type, node.domain, *node.input, "", *node.output, *attributes


def rounds_activations(model: Model) -> bool:
    """Check whether values between operators are integers that stand for real numbers."""
    return bool(find_integers(model.proto))


_SIZES = ((1, 8), (3, 5))
"""Batch sizes and lengths of random inputs."""
_BATCHES = (1, 3, 32)
"""Batch sizes of data."""


@dataclass(frozen=True)
class Check:
    """A row of the table of `validate`."""

    name: str
    ok: bool | None
    """Whether it holds; None if it does not apply to the model, or only informs."""
    text: str
    """The finding, with the largest difference and its tolerance."""


@dataclass(frozen=True)
class Validation(Printable):
    """The result of `validate`; it prints as a table.

    Attributes:
      rows: the checks, in order.
    """

    rows: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(row.ok is not False for row in self.rows)

    def __rich__(self) -> Group:
        table = Table()
        table.add_column("check", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("result", overflow="fold")
        for row in self.rows:
            table.add_row(row.name, {True: "ok", False: "FAILS", None: ""}[row.ok], Text(row.text))
        return Group(table)


def validate(
    model: Model | str | os.PathLike[str] | bytes | ModelProto,
    data: Any = None,
    *,
    against: Model | str | os.PathLike[str] | bytes | ModelProto | None = None,
    sizes: Mapping[str, int] | None = None,
    tolerance: float | None = None,
    preprocess: Mapping[str, Any] | None = None,
) -> Validation:
    """Check outputs, gradients and files of a model on this machine; the result prints as a table.

    Outputs are compared with those of onnxruntime, on random inputs at several sizes and on `data`;
    onnx's checker looks at the file; an untouched save must have all bits of the file; gradients
    are compared with central differences; integers of a quantized model with those of onnxruntime;
    and products with sparse weights are proved to be N:M. The page "Validation"
    describes each row.

    >>> import jaxonnx
    >>> from jaxonnx import demo
    >>> jaxonnx.validate(demo.model()).ok
    True

    Args:
      model: a Model, or anything that `jaxonnx.load` accepts. onnxruntime runs an .onnx file as it
        is, and of anything else what `Model.save` writes.
      data: inputs in any form that `Model.predict` accepts; up to 32 examples are used.
      against: another model or file, which must give the same outputs. If it does not, the row
        names the first value within the network that differs.
      sizes: open dimensions by name, for random inputs; others are chosen.
      tolerance: the largest difference of outputs from those of `against`, relative to the largest
        output. By default that of rounding: 1e-4 in float32, and 0.02 for a quantized model.
      preprocess: as in `jaxonnx.train`, for images.

    Returns:
      A `Validation`: `ok`, and the `rows` of the table. Without onnxruntime, it is not ok.

    Raises:
      InputError: the model, the data or `against` cannot be read, or do not fit each other.
    """
    check_arguments(validate, locals())
    try:
        other = None if against is None else as_model(against)
    except ModelError as error:
        raise ModelError(f"against: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(model, data, sizes or {}, preprocess, Path(folder))
        rows = [*run.check_outputs(), *run.check_file(), *run.check_save(), *run.check_gradients()]
        rows += [*run.count_parameters(), *run.check_integers(), *run.check_sparsity()]
        if other is not None:
            rows += run.compare(other, tolerance)
    return Validation(tuple(rows))


class _Run:
    """The checks of one model, which share inputs and files."""

    def __init__(
        self,
        source: Any,
        data: Any,
        sizes: Mapping[str, int],
        preprocess: Mapping[str, Any] | None,
        folder: Path,
    ):
        self.model, self._folder = as_model(source), folder
        is_file = isinstance(source, str | os.PathLike) and os.fspath(source).endswith(".onnx")
        self._file = Path(source) if is_file else folder / "model.onnx"
        if not is_file:
            self.model.save(self._file, check=False)
        self._sizes, self._data, self._preprocess = sizes, data, preprocess

    @cached_property
    def _found_sizes(self) -> dict[str, int]:
        model, shapes = self.model, {n: x.shape for n, x in self.model.tensors.items()}
        return find_sizes(model.graph, model.inputs, partial(_call, model), shapes, self._sizes)

    @cached_property
    def _random(self) -> list[tuple[str, dict[str, np.ndarray]]]:
        """Random inputs, and a text for each."""
        model, sizes = self.model, {**self._found_sizes, **self._sizes}
        feeds = [
            draw_inputs(model.inputs, batch, sizes, length=length, graph=model.graph, seed=seed)
            for seed, (batch, length) in enumerate(_SIZES)
        ]
        return [(f"random {_shapes(values)}", values) for values in feeds]

    def _read_data(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield the first examples of the data, at several batch sizes."""
        if self._data is None:
            return
        names = [value.name for value in self.model.inputs]
        data = open_data(self._data, labels=False)
        first = self.model.inputs[0].shape or (None,)
        for size in _BATCHES if not isinstance(first[0], int) else (first[0],):
            source = read_inputs(self.model, data, batch_size=size, preprocess=self._preprocess)
            batch = next(iter(source.batches(0)))
            values = dict(zip(names, map(np.asarray, batch.inputs), strict=True))
            yield f"data {_shapes(values)}", values

    @cached_property
    def _feeds(self) -> list[tuple[str, dict[str, np.ndarray]]]:
        feeds = [*self._read_data()]
        try:
            return [*self._random, *feeds]
        except InputError:
            if not feeds:
                raise
        return feeds

    @property
    def _tolerance(self) -> float | None:
        return QUANTIZED if is_quantized(self.model) else None

    def check_outputs(self) -> Iterator[Check]:
        """Compare outputs with onnxruntime's."""
        name = "outputs, as onnxruntime"
        if not has_onnxruntime():
            yield Check(name, False, f"not compared: {INSTALL}")
            return
        file = self._file
        if training_nodes(self.model.proto.graph):  # which a call, and a saved file, do not
            file = self._folder / "inference.onnx"
            self.model.save(file, check=False)
        if training_nodes(read(file).proto.graph):
            yield Check(name, None, "does not apply: the file runs nodes in training mode")
            return
        try:
            session = Session(file)
        except InputError as error:
            yield Check(name, False, str(error))
            return
        for text, feeds in self._feeds:
            try:
                theirs = session.run(feeds)
                ours = _call(self.model, feeds)
            except Error as error:
                remedy = "; give data, or sizes of open dimensions" if "random" in text else ""
                yield Check(name, False, f"{text}: {error}{remedy}")
                continue
            parts = [
                compare_arrays(a, b, self._tolerance) for a, b in zip(ours, theirs, strict=True)
            ]
            worst, where = largest(parts), ""
            if not worst.ok:
                proto, origin = onnx.load(file), make_origin(self.model)
                pair = origin.run, run_session(proto)
                where = name_difference(proto.graph, origin.names, pair, feeds, self._tolerance)
            yield _judge(name, text, worst, where)

    def check_file(self) -> Iterator[Check]:
        """Ask onnx's checker, whose refusal does not make a file wrong that runtimes accept."""
        name, size = "file, as onnx's checker", sum(x.nbytes for x in self.model.tensors.values())
        if reason := find_excess(size):
            yield Check(name, None, f"not checked: {reason}")
        elif fault := find_fault(onnx.load(self._file)):
            yield Check(name, None, f"refuses it: {fault}")
        else:
            yield Check(name, True, "accepts it")

    def check_save(self) -> Iterator[Check]:
        """Load and save the file, and compare all bits."""
        saved = self._folder / "saved.onnx"
        load(self._file).save(saved)
        changes = find_changes(self._file, saved)
        text = (
            list_some(changes, "")
            if changes
            else "every tensor and node is the file's, bit for bit"
        )
        yield Check("untouched save", not changes, text)

    def check_gradients(self) -> Iterator[Check]:
        """Compare gradients with central differences."""
        name, model = "gradients", self.model
        types = [y.dtype for y in model.outputs]
        real = [x for x in types if x is not None and jnp.issubdtype(x, jnp.floating)]
        reason = ""
        if not model.params or not real:
            reason = "no parameters" if real else "no output is a real number"
        elif not model.program.compiled:
            reason = "the shape of a result depends on values, so that the model has no gradient"
        elif rounds_activations(model):
            reason = "activations are rounded to integers, whose gradient is straight-through"
        if reason:
            yield Check(name, None, f"does not apply: {reason}")
            return
        feeds = next(self._read_data(), self._feeds[0])[1]
        slopes = measure_slopes(model, feeds)
        wrong = [slope for slope in slopes if slope.conclusive and not slope.ok]
        sharp = [slope for slope in slopes if slope.conclusive]
        errors = [abs(s.gradient - s.difference) / (s.size or 1) for s in sharp]
        if wrong:
            yield Check(name, False, list_some(map(str, wrong), ""))
        elif 2 * len(sharp) < len(slopes) or not slopes:
            yield Check(
                name, False, "inconclusive: differences are too inexact at these inputs; give data"
            )
        else:
            bound = max(s.error / (s.size or 1) for s in sharp)
            yield Check(
                name,
                True,
                f"central differences along {format_count(len(sharp), 'random direction')} agree: "
                f"{max(errors):.1e} (their own error: {bound:.1e})",
            )

    def count_parameters(self) -> Iterator[Check]:
        """Count tensors by the reason why they are trained or not."""
        rules = self.model._places.roles.rules
        groups: dict[str, Collection[str]] = {"trained": self.model.params}
        groups |= {"state": self.model.state, "constant": self.model._places.roles.constants}
        for kind, tensors in groups.items():
            reasons = Counter(rules[name].name if name in rules else "chosen" for name in tensors)
            text = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            if tensors:
                yield Check(kind, None, f"{format_count(len(tensors), 'tensor')}: {text}")

    def check_integers(self) -> Iterator[Check]:
        """Compare the integers of a quantized model with onnxruntime's."""
        name = "integers, as onnxruntime"
        if not rounds_activations(self.model):
            return
        if not has_onnxruntime():
            yield Check(name, False, f"not compared: {INSTALL}")
            return
        try:
            comparison = compare_integers(self.model.to_onnx(), self._feeds[0][1], QUANTIZED)
        except Error as error:
            yield Check(name, False, str(error))
            return
        first = (
            comparison.first and f"; the first that differs by more than one: {comparison.first}"
        )
        text = (
            f"{comparison.unequal:,} of {comparison.count:,} differ, by at most {comparison.gap}, "
            f"from the same integers before{first}"
        )
        yield Check(name, comparison.ok, text)

    def check_sparsity(self) -> Iterator[Check]:
        """Prove the sparsity that the file records."""
        if self.model.sparsity is None:
            return
        from jaxonnx import sparse

        try:
            proof = sparse.verify(self.model)
        except SparsityError as error:
            yield Check("sparsity", False, str(error).splitlines()[0])
            return
        count = sum(product.count for product in proof.products)
        patterns = ", ".join(dict.fromkeys(str(product.pattern) for product in proof.products))
        yield Check("sparsity", True, f"{format_count(count, 'product')} proved to be {patterns}")

    def _name_difference(
        self, other: Origin, feeds: Mapping[str, Any], tolerance: float | None
    ) -> str:
        origin = make_origin(self.model)
        names, runs = {*origin.names} & {*other.names}, (origin.run, other.run)
        if not names:
            return "; the two share no names of values within"
        return name_difference(self.model.proto.graph, names, runs, feeds, tolerance)

    def compare(self, other: Model, tolerance: float | None) -> Iterator[Check]:
        """Compare outputs with those of another model."""
        if tolerance is None and (is_quantized(self.model) or is_quantized(other)):
            tolerance = QUANTIZED
        for text, feeds in self._feeds:
            ours, theirs = _call(self.model, feeds), _call(other, feeds)
            if len(ours) != len(theirs):
                raise InputError(
                    f"the model has {len(ours)} outputs, and the other one {len(theirs)}"
                )
            parts = [compare_arrays(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)]
            worst = largest(parts)
            where = "" if worst.ok else self._name_difference(make_origin(other), feeds, tolerance)
            yield _judge("outputs, as the other", text, worst, where)


def _call(model: Model, feeds: Mapping[str, Any]) -> tuple:
    outputs = model(**feeds)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _judge(name: str, text: str, difference: Difference, more: str = "") -> Check:
    return Check(name, difference.ok, f"{text}: {difference}{more}")


def _shapes(values: Mapping[str, np.ndarray]) -> str:
    shapes = dict.fromkeys("x".join(map(str, x.shape)) or "scalar" for x in values.values())
    return list_some(shapes, "")


_STEPS = 2.0 ** np.arange(-4, -15, -2)
"""Steps, relative to the root mean square of a tensor."""
_SAMPLE = 8
"""The number of tensors with a direction of their own; another one is of all of them."""
_ROUNDING = 2e-3
"""The error of the gradient itself, of the usual size of a derivative."""
_DEVIATIONS = 4
"""Of the measured error, which is that of a sum of independent errors: one standard deviation."""
_SHARP = 0.1
"""A difference with a larger tolerance, relative to the usual derivative, tells nothing."""
_SHARP_EPS = 400
"""The same in units of the spacing of numbers: 0.4 in float16."""


class Slope(NamedTuple):
    """A derivative along a direction."""

    where: str
    """The tensor that is moved."""
    gradient: float
    difference: float
    """By central differences."""
    error: float
    """The measured error of the difference."""
    size: float
    """The usual size of a derivative along such directions."""
    limit: float
    """The largest tolerance, relative to `size`, with which the difference tells something."""

    @property
    def conclusive(self) -> bool:
        return _DEVIATIONS * self.error <= self.limit * self.size

    @property
    def ok(self) -> bool:
        """Whether both derivatives agree within the measured error."""
        allowed = _DEVIATIONS * self.error + _ROUNDING * self.size
        return abs(self.gradient - self.difference) <= allowed

    def __str__(self) -> str:
        return f"{self.where}: {self.gradient:.4g}, by differences {self.difference:.4g}"


def measure_slopes(model: Model, feeds: Mapping[str, Any], seed: int = 0) -> list[Slope]:
    """Measure derivatives of a random projection of the outputs, along random directions.

    Outputs are float32, so a difference over a step h has two errors: of rounding, which grows as
    1 / h, and of curvature and kinks (Relu, MaxPool), which grows with h. Both are in the bend
    y(h) - 2 y(0) + y(-h), which is zero for a line: its norm, over 2 h, measures the error of the
    central difference. Of a ladder of steps the one with the smallest error is taken, and that
    error is the tolerance, not a number chosen beforehand. Outputs are subtracted and summed in
    float64.

    Args:
      model: a model with parameters and outputs of real numbers.
      feeds: its inputs by name.

    Returns:
      A slope for each tensor of a sample that is spread over the network, and one for all tensors
      together; none if outputs are not finite.
    """
    random = np.random.default_rng(seed)

    @jax.jit
    def outputs(params, direction, step):
        moved = jax.tree.map(lambda w, d: (w + step * d).astype(w.dtype), params, direction)
        results = jax.tree.leaves(model.apply(moved, **feeds))
        return [y for y in results if jnp.issubdtype(y.dtype, jnp.floating)]

    zero = {name: jnp.zeros(w.shape, jnp.float32) for name, w in model.params.items()}
    center = outputs(model.params, zero, 0.0)
    if not all(np.isfinite(np.asarray(y, np.float64)).all() for y in center):
        return []
    weights = [random.standard_normal(y.shape).astype(np.float32) for y in center]

    @jax.jit
    def gradients(params):
        def project(params):
            pairs = zip(weights, outputs(params, zero, 0.0), strict=True)
            return sum(jnp.vdot(w, y.astype(jnp.float32)) for w, y in pairs)

        return jax.grad(project)(params)

    slopes = gradients(model.params)
    drawn = {}  # random numbers with the root mean square of each tensor
    for name, w in model.params.items():
        size = float(np.sqrt(np.mean(np.square(np.asarray(w, np.float64))))) or 1.0
        drawn[name] = (size * random.standard_normal(w.shape)).astype(np.float32)

    def project(direction, step) -> np.ndarray:
        """Multiply all outputs with their weights; the sum of these products is differentiated."""
        pairs = zip(weights, outputs(model.params, direction, step), strict=True)
        return np.concatenate([(w * np.asarray(y, np.float64)).reshape(-1) for w, y in pairs])

    base = project(zero, 0.0)
    # outputs that do not move by chance, or not at all, are still rounded
    eps = max(float(jnp.finfo(y.dtype).eps) for y in (*center, *model.params.values()))
    rounding = float(np.linalg.norm(base) * eps / 2)

    def measure(where: str, names: Sequence[str]) -> Slope:
        direction = {**zero, **{name: drawn[name] for name in names}}
        pairs = ((np.asarray(slopes[n], np.float64), drawn[n]) for n in names)
        parts = np.concatenate([(slope * d).reshape(-1) for slope, d in pairs])
        ladder = []
        for step in _STEPS:
            up, down = (project(direction, x) for x in (step, -step))
            bend = float(np.linalg.norm(up - 2 * base + down))
            error = max(bend, rounding) / (2 * step) if np.isfinite(bend) else np.inf
            ladder.append((error, float((up - down).sum() / (2 * step))))
        error, difference = min(ladder)
        gradient = float(parts.sum())
        size = max(float(np.linalg.norm(parts)), abs(difference))
        return Slope(where, gradient, difference, error, size, max(_SHARP, _SHARP_EPS * eps))

    names = [*model.params]
    chosen = [names[i] for i in np.linspace(0, len(names) - 1, _SAMPLE).round().astype(int)]
    sample = [measure(f"'{name}'", [name]) for name in dict.fromkeys(chosen)]
    return [*sample, measure("all tensors", names)]

"""The bounds of the rules of jaxonnx.lowering, fitted on this machine: `lowerings --fit`.

Each bound is tried with other values, on shapes to both sides of it. Programs that do not change
with it are compiled and timed once, the others in interleaved rounds.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxonnx.lowering import _conv, _pool, _recurrence, jit

GAIN = 1.1
"""How much quicker another value must be to be named."""


_GRADIENTS = ("forward", "gradient of x", "gradient of w")
_BOTH = ("forward", "forward and backward")
NAMES = {
    "convolution": _GRADIENTS,
    "unturned": _GRADIENTS,
    "pool": _BOTH,
    "sum": _BOTH,
    "recurrence": _BOTH,
}
"""What each family of forms yields."""


class Bound(NamedTuple):
    """A number of a module that decides between two forms.

    Attributes:
      family: of `NAMES`; "unturned" has the weight in the order of the file.
      shapes: as in `benchmarks.speed.lowerings`.
    """

    module: Any
    name: str
    values: tuple[int, ...]
    family: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def now(self) -> int:
        return getattr(self.module, self.name)


# shapes are: batch, input channels, output channels, image, kernel, stride, groups
BOUNDS = (
    Bound(
        _conv,
        "MERGED_CHANNELS",
        (8, 16, 32, 64, 128),
        "convolution",
        ((16, 64, 64, 16, 3, 1, 4), (4, 128, 128, 14, 3, 1, 32), (8, 96, 96, 16, 3, 1, 12)),
    ),
    Bound(
        _conv,
        "NARROW",
        (8, 16, 32, 64),
        "convolution",
        (
            (16, 1, 16, 28, 3, 1, 1),
            (16, 1, 32, 28, 5, 1, 1),
            (16, 3, 16, 32, 3, 1, 1),
            (1, 3, 16, 256, 3, 1, 1),
            (16, 3, 48, 32, 3, 1, 1),
            (16, 6, 16, 32, 3, 1, 1),
        ),
    ),
    Bound(
        _conv,
        "SLOW_WORK",
        (2**14, 2**16, 2**18, 2**20, 2**22),
        "convolution",
        ((1, 16, 16, 2, 3, 1, 1), (4, 32, 32, 2, 3, 1, 1), (16, 64, 64, 2, 3, 1, 1)),
    ),
    Bound(
        _conv,
        "FEW_WINDOWS",
        (1, 4, 16, 64, 256),
        "convolution",
        (
            (16, 32, 64, 4, 3, 2, 1),
            (16, 64, 64, 8, 5, 2, 1),
            (16, 64, 128, 16, 3, 2, 1),
            (8, 3, 192, 224, 16, 16, 1),
        ),
    ),
    Bound(
        _conv,
        "LARGE_WEIGHT",
        (2**14, 2**16, 2**18, 2**20),
        "unturned",
        ((16, 64, 64, 2, 3, 1, 1), (16, 256, 256, 2, 3, 1, 1), (8, 64, 64, 14, 3, 1, 1)),
    ),
    *(
        Bound(
            _conv,
            name,
            (8, 12, 20, 24, 32, 64),
            "convolution",
            ((64, 32, 64, 13, 3, 1, 1), (16, 32, 32, 28, 3, 1, 1), (8, 64, 64, 28, 3, 1, 1)),
        )
        for name in ("MANY_CHANNELS", "MANY_CHANNELS_OF_WEIGHT")
    ),
    Bound(
        _conv,
        "MANY_TILES",
        (8, 32, 128, 512),
        "convolution",
        ((1, 64, 64, 8, 3, 1, 1), (1, 128, 128, 16, 3, 1, 1), (16, 256, 256, 4, 3, 1, 1)),
    ),
    Bound(
        _pool,
        "UNROLLED",
        (4, 9, 16, 25),
        "pool",
        ((64, 32, 26, 2, 2), (16, 64, 32, 3, 2), (8, 32, 32, 4, 2), (2, 64, 20, 5, 1)),
    ),
    Bound(
        _pool,
        "UNROLLED",
        (4, 9, 16, 25),
        "sum",
        ((64, 32, 28, 2, 2), (16, 64, 16, 3, 1), (8, 32, 32, 4, 2), (2, 64, 20, 5, 1)),
    ),
    Bound(
        _recurrence,
        "LARGE",
        (2**16, 2**17, 2**18, 2**19),
        "recurrence",
        ((64, 32, 128, 128), (64, 32, 128, 192), (64, 32, 128, 256), (64, 16, 256, 320)),
    ),
    Bound(
        _recurrence,
        "VAST",
        (2**18, 2**20, 2**22),
        "recurrence",
        ((64, 32, 128, 256), (32, 32, 256, 512), (16, 32, 256, 1024)),
    ),
    Bound(
        _recurrence,
        "FEW",
        (1, 4, 16, 64, 256),
        "recurrence",
        ((64, 1, 128, 256), (64, 4, 128, 256), (64, 16, 128, 256), (32, 128, 128, 256)),
    ),
)

Forms = Callable[..., Iterator[tuple[Callable, Callable, list[np.ndarray]]]]


def _lower(function: Callable, arguments: Any) -> Any:
    jitted = jit(function, onednn=True)
    return jitted.lower(jitted.trace(*arguments))


def fit(families: dict[str, Forms], rounds: int) -> None:
    """Print what other values of each bound would gain or lose.

    Args:
      families: for the names of `NAMES`, functions of a shape that yield plain and fast
        forms and their arguments.
    """
    table = Table("bound", "now", "time of others", "best", title="fitted here")
    better = []
    for bound in BOUNDS:
        ratios = {value: [] for value in bound.values}
        for shape in bound.shapes:
            for what, times in _timed(bound, families[bound.family], shape, rounds):
                for value, ratio in times.items():
                    ratios[value].append(ratio)
                value = min(times, key=lambda value: times[value])
                if times[value] * GAIN < 1:
                    sizes = " ".join(map(str, shape))
                    better.append(
                        f"{bound.name}: {value} takes {times[value]:.2f} of the time of "
                        f"{bound.now} for {bound.family} {sizes}, {what}"
                    )
        means = {value: float(np.exp(np.mean(np.log(row)))) for value, row in ratios.items()}
        best = min(means, key=lambda value: means[value])
        cells = ", ".join(f"{value}: {mean:.2f}" for value, mean in means.items())
        table.add_row(f"{bound.name}, {bound.family}", str(bound.now), cells, str(best))
    console = Console()
    console.print(table)
    for line in better or [f"No other value gains {GAIN - 1:.0%} for any of the shapes."]:
        console.print(line, soft_wrap=True)


def _timed(
    bound: Bound, forms: Forms, shape: tuple[int, ...], rounds: int
) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield, for each function, the times with each value over that with the present one."""
    texts: dict[int, list[Any]] = {}
    for value in {*bound.values, bound.now}:
        with mock.patch.object(bound.module, bound.name, value):
            # anew, because a trace that JAX remembers would have the value before
            jax.clear_caches()
            texts[value] = [
                (_lower(fast, arguments), arguments) for _, fast, arguments in forms(*shape)
            ]
    for i, (_, arguments) in enumerate(texts[bound.now]):
        lowered = {value: pairs[i][0] for value, pairs in texts.items()}
        compiled = {low.as_text(): low for low in lowered.values()}
        if len(compiled) == 1:
            continue
        compiled = {text: low.compile() for text, low in compiled.items()}
        medians = _medians(compiled, arguments, rounds)
        times = {value: medians[low.as_text()] for value, low in lowered.items()}
        ratios = {value: times[value] / times[bound.now] for value in bound.values}
        yield NAMES[bound.family][i], ratios


def _medians(compiled: dict[str, Any], arguments: list, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {text: [] for text in compiled}
    for _ in range(rounds + 1):
        for text, function in compiled.items():
            began = time.perf_counter()
            for _ in range(3):
                jax.block_until_ready(function(*arguments))
            times[text].append(time.perf_counter() - began)
    return {text: statistics.median(row[1:]) for text, row in times.items()}

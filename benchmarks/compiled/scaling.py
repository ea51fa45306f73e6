"""What training steps send between devices: jaxonnx beside hand-written Flax.

    python -m benchmarks.compiled.scaling [--networks lenet encoder lstm] [--shardings data fsdp]
                                 [--devices 8] [--grow 8 16 32 64 128 256]

Each step (forward, softmax cross-entropy, backward and Adam) is compiled for devices that XLA fakes
on this CPU, under the same shardings in both systems, and nothing is run: the bytes are those of
the collectives in the compiled program, so they are the same in every run. The batch is sharded
over all devices; under "data" all else is replicated, under "fsdp" the largest axis of every tensor
is sharded that the devices divide, unless the tensor is small. Printed are

- the kilobytes that a device gets from collectives, and the collectives by kind;
- with `--grow`, what falls to each device as their number grows and its share of the batch stays:
  operations, memory and bytes should stay as well, or the whole grows faster than linearly.
"""

import argparse
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.layers.onnx_file import write
from benchmarks.networks import NETWORKS, Network
from benchmarks.systems import LEARNING_RATE, flax_functions, optax_step

SHARDINGS = ("data", "fsdp")
SMALL = 2**12
"""Elements up to which a tensor is replicated under "fsdp"."""

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|branch_computations)=(\{[^}]*\}|[^\s,]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")


@dataclass
class Sent:
    """What collectives give each device in a step."""

    count: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        return ", ".join(f"{self.count[kind]} {kind}" for kind in KINDS if self.count[kind])


def collectives(program: str) -> Sent:
    """Return what the collectives in the text of a compiled program give each device.

    A loop counts as often as it runs. The bytes of a reduce-scatter are those of what it reduces,
    as many as if it were an all-reduce of which each device keeps a part.
    """
    computations: dict[str, list[re.Match]] = {}
    entry = lines = None
    for line in program.splitlines():
        if head := _COMPUTATION.match(line):
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif lines is not None and (instruction := _INSTRUCTION.match(line)):
            lines.append(instruction)
    assert entry is not None, "the text has no ENTRY"
    sent = Sent()

    def add(name: str, times: int) -> None:
        for shape, kind, rest in (line.groups() for line in computations[name]):
            if kind.removesuffix("-start") in KINDS:
                assert kind in KINDS, f"{kind}: collectives are expected to be synchronous"
                sent.count[kind] += times
                sent.bytes[kind] += times * _bytes(shape) * _group(kind, rest)
            elif called := _CALLED.findall(rest):
                for inner in re.findall(r"[\w.-]+", " ".join(called)):
                    add(inner, times * _trips(kind, rest))

    add(entry, 1)
    return sent


def _bytes(shape: str) -> int:
    sizes = _SHAPE.findall(shape)
    return sum(
        math.prod(map(int, filter(None, axes.split(",")))) * int(bits or 8) // 8
        for _, bits, axes in sizes
    )


def _group(kind: str, rest: str) -> int:
    """Return by how much what a reduce-scatter reduces is larger than its result."""
    if kind != "reduce-scatter":
        return 1
    group = _GROUP.search(rest)
    assert group is not None, rest
    return int(group[2] or len(group[1].split(",")))


def _trips(kind: str, rest: str) -> int:
    if kind != "while":
        return 1
    trips = _TRIPS.search(rest)
    assert trips is not None, "a loop whose length XLA does not know"
    return int(trips[1])


@dataclass(frozen=True)
class Step:
    """A step `function(carry, *rest) -> (carry, _)`, and the shapes of its arguments."""

    function: Callable[..., Any]
    carry: Any
    batch: Any
    frozen: tuple = ()
    on: Callable[..., "Step"] | None = None
    """`on(mesh, rule)` makes the step that knows where its arrays lie, if there is one."""


def ours(network: Network, examples: int) -> Step:
    import jax
    import optax

    import jaxonnx
    from jaxonnx.training import Batch, step

    with tempfile.TemporaryDirectory() as folder:
        write(network, path := Path(folder) / "network.onnx")
        model = jaxonnx.load(path)
    # a table of positions that is added may be learned or not: the file does not tell
    tables = {n for n, v in model.state.items() if v.ndim == 2}
    model = model.with_trainable(lambda name, _: name in model.params or name in tables)
    loss = "softmax_cross_entropy_with_integer_labels"
    x, y = _examples(network, examples)
    batch = Batch((x,), y, jax.ShapeDtypeStruct((examples,), "float32"))

    def build(**where):
        one = step(model, loss, optax.adam(LEARNING_RATE), **where)
        return Step(one.update, one.init(), batch, (one.frozen,))

    def on(mesh, rule):
        return build(mesh=mesh, sharding=lambda name, shape: rule(shape))

    return replace(build(), on=on)


def flax(network: Network, examples: int) -> Step:
    import jax

    x, y = _examples(network, examples)
    if len(x.shape) == 4:
        n, channels, *size = x.shape
        x = jax.ShapeDtypeStruct((n, *size, channels), x.dtype)
    init, train, _ = flax_functions(network)
    step, optimizer = optax_step(train)
    params, state = jax.eval_shape(init, jax.random.key(0), x)
    carry = params, state, jax.eval_shape(optimizer.init, params)
    return Step(lambda carry, pair: step(carry, *pair), carry, (x, y))


SYSTEMS = {"jaxonnx": ours, "flax": flax}


def _examples(network: Network, count: int):
    import jax

    kind = "int32" if network.tokens else "float32"
    x = jax.ShapeDtypeStruct((count, *network.shape[1:]), kind)
    return x, jax.ShapeDtypeStruct((count,), "int32")


def largest_axis(shape: tuple[int, ...], devices: int):
    """Return the spec that shards the largest axis that the devices divide, unless all is small."""
    from jax import P

    sizes = {size: axis for axis, size in enumerate(shape) if size % devices == 0}
    if math.prod(shape) <= SMALL or not sizes:
        return P()
    return P(*(None,) * sizes[max(sizes)], "data")


def placed(step: Step, sharding: str, devices: int) -> Step:
    """Return a step with the shapes of its arguments, and their shardings over so many devices."""
    import jax
    from jax import P
    from jax.sharding import AxisType, NamedSharding

    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])

    def place(tree, spec=None):
        def lay(x):
            where = x.sharding if spec is None else NamedSharding(mesh, spec(x.shape))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        return jax.tree.map(lay, tree)

    whole = lambda shape: P()  # noqa: E731
    rule = whole if sharding == "data" else lambda shape: largest_axis(shape, devices)
    batch = place(step.batch, lambda shape: P("data"))
    if step.on is not None:
        step = step.on(mesh, rule)
        return replace(step, carry=place(step.carry), batch=batch, frozen=place(step.frozen))
    return replace(
        step, carry=place(step.carry, rule), batch=batch, frozen=place(step.frozen, whole)
    )


def compiled(step: Step, sharding: str, devices: int):
    """Return the compiled step, whose carry keeps its sharding."""
    import jax

    step = placed(step, sharding, devices)
    keep = jax.tree.map(lambda x: x.sharding, step.carry)
    mesh = jax.tree.leaves(keep)[0].mesh
    function = jax.jit(step.function, donate_argnums=0, out_shardings=(keep, None))
    with jax.set_mesh(mesh):
        return function.lower(step.carry, step.batch, *step.frozen).compile()


@dataclass
class Figures:
    """What a compiled step costs each device."""

    flops: float
    memory: int
    sent: Sent


def measure(system: str, name: str, sharding: str, devices: int) -> Figures:
    """Compile a step of the network's batch on each device, in a process that did nothing else."""
    fake(devices)
    network = NETWORKS[name]
    step = SYSTEMS[system](network, network.shape[0] * devices)
    return figures(compiled(step, sharding, devices))


def figures(program) -> Figures:
    plan = program.memory_analysis()
    memory = plan.argument_size_in_bytes + plan.temp_size_in_bytes
    return Figures(program.cost_analysis()["flops"], memory, collectives(program.as_text()))


def fake(devices: int) -> None:
    """Let this process have so many CPU devices; nothing may have asked for devices before."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def compare(pool, options, console: Console) -> None:
    n = options.devices
    for name in options.networks:
        table = Table(
            *("sharding", "jaxonnx, kB", "Flax, kB", "ratio", "jaxonnx", "Flax"),
            title=f"{name}: what collectives give each of {n} devices in a step",
        )
        for sharding in options.shardings:
            sent = [pool.apply(measure, (s, name, sharding, n)).sent for s in SYSTEMS]
            us, them = (s.total for s in sent)
            kilobytes = (f"{total / 1e3:.0f}" for total in (us, them))
            table.add_row(sharding, *kilobytes, f"{us / them:.2f}", *map(str, sent))
        console.print(table)


def grow(pool, options, console: Console) -> None:
    for name in options.networks:
        for sharding in options.shardings:
            table = Table(
                *("devices", "MFLOP", "memory, MB", "collectives, kB", "collectives"),
                title=f"{name}, {sharding}: each device, {NETWORKS[name].shape[0]} examples each",
            )
            rows = {n: pool.apply(measure, ("jaxonnx", name, sharding, n)) for n in options.grow}
            for n, f in rows.items():
                numbers = f.flops / 1e6, f.memory / 1e6, f.sent.total / 1e3
                table.add_row(str(n), *(f"{x:.2f}" for x in numbers), str(f.sent))
            first, last = rows[min(rows)], rows[max(rows)]
            ratios = (last.flops / first.flops, last.memory / first.memory)
            moved = last.sent.total / first.sent.total
            table.add_row("last / first", *(f"{x:.2f}" for x in (*ratios, moved)))
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ["lenet", "encoder", "lstm"]
    parser.add_argument("--networks", choices=NETWORKS, default=default, nargs="+")
    parser.add_argument("--shardings", choices=SHARDINGS, default=[*SHARDINGS], nargs="+")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--grow", type=int, nargs="+", help="tables for these numbers of devices")
    options = parser.parse_args()
    console = Console(width=150)
    # the number of fake devices is fixed for a process, so each program has its own
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        compare(pool, options, console)
        if options.grow:
            grow(pool, options, console)


if __name__ == "__main__":
    main()

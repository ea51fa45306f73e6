"""One ONNX file in one runtime, in a process of its own, for `benchmarks.real`.

    python -m benchmarks.real.worker <onnxruntime | jaxonnx | again> <file> <folder>

Prints lines of JSON with figures, as it gets them. The folder hands on the inputs that onnxruntime
took, its outputs, and the file that jaxonnx saved.
"""

import itertools
import json
import os
import pickle
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CHECK = "JAXONNX_CHECK"
"""The environment variable of processes that measure nothing."""

OPEN = (16, 64, 224, 256, 128, 512, 32, 1, 2, 8)
"""Sizes tried for open dimensions other than the first, which is 1."""


def resident(field: str) -> float:
    """Return megabytes of this process: VmRSS is the present, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {field}")


class Clock:
    """CPU seconds, of all threads, since the last reading."""

    def __init__(self):
        self.last = time.process_time()

    def read(self) -> float:
        before, self.last = self.last, time.process_time()
        return self.last - before


def fastest(run) -> float:
    """Return the least milliseconds of a call, of up to 20 within two seconds."""
    times, end = [], time.perf_counter() + 2
    while len(times) < 3 or (len(times) < 20 and time.perf_counter() < end):
        if CHECK in os.environ:
            return 0.0
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def random_input(name: str, dtype: np.dtype, shape: tuple[int, ...], below: int) -> np.ndarray:
    """Return random numbers that most networks take at an input of this name, integers < below."""
    rng = np.random.default_rng(0)
    if dtype.kind == "O":
        return np.full(shape, "a", object)
    if dtype.kind == "b" or "mask" in name.lower():
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 2 if "type" in name.lower() else below, shape).astype(dtype)
    return rng.uniform(0, 1, shape).astype(dtype)


def candidates(path: Path, values) -> Iterator[dict[str, np.ndarray]]:
    """Yield inputs to try, by name; `values` are (name, dtype, shape) of the inputs."""
    beside = path.with_name(path.name + ".npz")
    if beside.exists():
        yield dict(np.load(beside))
        return
    is_open = any(not isinstance(d, int) or d < 1 for _, _, shape in values for d in shape)
    for size, below in itertools.product(OPEN if is_open else OPEN[:1], (10, 2)):
        inputs: dict[str, np.ndarray] = {}
        sizes: dict[str, int] = {}
        for name, dtype, shape in sorted(values, key=lambda value: -len(value[2])):
            made_shape = []
            for axis, d in enumerate(shape):
                open_size = 1 if axis == 0 and len(shape) > 1 else size
                if isinstance(d, str):  # a name has one size
                    open_size = sizes.setdefault(d, open_size)
                made_shape.append(d if isinstance(d, int) and d > 0 else open_size)
            inputs[name] = random_input(name, np.dtype(dtype), tuple(made_shape), below)
        yield inputs


def leaves(value) -> list[np.ndarray]:
    """Return the arrays of outputs, also those within sequences and maps."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [np.asarray(value)]


def difference(ours, theirs) -> float:
    """Return the greatest difference of outputs, over the greatest number of the output."""
    ours, theirs = leaves(ours), leaves(theirs)
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        return float("inf")
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.dtype.kind in "OUS":
            worst = max(worst, float((a.astype(str) != b.astype(str)).any()))
        elif a.size:
            a, b = a.astype(np.float64), b.astype(np.float64)
            odd = ~np.isfinite(b)
            if not np.array_equal(a[odd], b[odd], equal_nan=True):
                return float("inf")
            largest = np.abs(b[~odd]).max(initial=0) or 1
            worst = max(worst, float(np.abs(a - b)[~odd].max(initial=0) / largest))
    return worst


def session(path: Path):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if CHECK in os.environ:
        options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_onnxruntime(path: Path, folder: Path) -> Iterator[dict]:
    """Measure onnxruntime; leave the inputs that it took, and its outputs, in the folder."""
    import onnxruntime.capi.onnxruntime_pybind11_state as errors  # type: ignore[import]

    clock = Clock()
    runtime = session(path)
    yield {"load": clock.read(), "load MB": resident("VmHWM")}
    types = {"float": "float32", "double": "float64", "string": "object"}
    values = []
    for value in runtime.get_inputs():
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        values.append((value.name, types.get(kind, kind), value.shape))
    for inputs in candidates(path, values):
        clock.read()
        try:
            outputs = runtime.run(None, inputs)
            break
        except (errors.Fail, errors.InvalidArgument, errors.RuntimeException) as error:
            reason = error
    else:
        raise RuntimeError(f"no inputs that it takes: {reason}")
    yield {"first": clock.read(), "ms": fastest(lambda: runtime.run(None, inputs))}
    yield {"peak MB": resident("VmHWM")}
    (folder / "results").write_bytes(pickle.dumps((inputs, outputs)))


def run_again(path: Path, folder: Path) -> Iterator[dict]:
    """Run a saved file in onnxruntime, and compare the bits with those of the original."""
    inputs, outputs = pickle.loads((folder / "results").read_bytes())
    new = session(path).run(None, inputs)
    pairs = zip(leaves(new), leaves(outputs), strict=True)
    yield {"same bits": all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)}


def stored(path: Path) -> dict[str, list[tuple]]:
    """Return the tensors of a file's graphs and functions by name; a Constant has its output's."""
    import onnx

    tensors: dict[str, list[tuple]] = {}
    messages: list[tuple] = [(onnx.load(path), "")]
    while messages:
        message, constant = messages.pop()
        if isinstance(message, onnx.TensorProto):
            array = onnx.numpy_helper.to_array(message)
            data = str(array.tolist()) if array.dtype == object else array.tobytes()
            about = (message.data_type, tuple(message.dims), hash(data))
            tensors.setdefault(constant or message.name, []).append(about)
            continue
        if isinstance(message, onnx.NodeProto):
            constant = message.output[0] if message.op_type == "Constant" else ""
        for field, value in message.ListFields():
            if field.message_type:
                messages += [(v, constant) for v in (value if field.is_repeated else [value])]
    return tensors


def run_jaxonnx(path: Path, folder: Path) -> Iterator[dict]:
    """Measure jaxonnx on the inputs that onnxruntime took; leave the saved file in the folder."""
    import jax
    import jax.numpy as jnp

    import jaxonnx

    warnings.simplefilter("ignore")
    clock = Clock()
    model = jaxonnx.load(path)
    jax.block_until_ready((model.params, model.state))
    yield {"load": clock.read(), "load MB": resident("VmHWM"), "parameters": len(model.params)}
    half = any("16" in str(value.dtype) for value in model.params.values())
    yield {
        "warnings": model.warnings,
        "half": half,
        "trained": sum(value.size for value in model.params.values()),
        "frozen": {name: list(value.shape) for name, value in model.state.items()},
        "operators": sorted({node.op.name for node in model.graph.nodes}),
    }
    if (folder / "results").exists():
        inputs, expected = pickle.loads((folder / "results").read_bytes())
    else:
        values = [(v.name, v.dtype or np.dtype("float32"), v.shape or ()) for v in model.inputs]
        inputs, expected = next(candidates(path, values)), None
    inputs = [inputs[value.name] for value in model.inputs]  # "rng" may be one of the names
    clock.read()

    def call():
        outputs = jax.block_until_ready(model(*inputs))
        return outputs if len(model.outputs) > 1 else (outputs,)

    outputs = call()
    yield {"first": clock.read(), "ms": fastest(call), "peak MB": resident("VmHWM")}
    if expected is not None:
        yield {"difference": difference(outputs, expected)}
    clock.read()
    model.save(folder / "saved.onnx")
    size = sum(f.stat().st_size for f in folder.glob("saved.onnx*"))
    yield {"save": clock.read(), "saved MB": size / 1e6, "save MB": resident("VmHWM")}
    yield {"same tensors": stored(path) == stored(folder / "saved.onnx")}
    del expected
    if not model.params or not model.program.compiled:
        return  # evaluated node by node: no gradient to compile

    def loss(params, state, inputs):
        outputs = model.apply(params, *inputs, state=state)
        leaves = jax.tree.leaves(outputs)
        floats = [y for y in leaves if jnp.issubdtype(jnp.result_type(y), jnp.floating)]
        return sum(((y.astype(jnp.float32) ** 2).mean() for y in floats), jnp.zeros(()))

    clock.read()
    gradient = jax.jit(jax.grad(loss)).lower(model.params, model.state, inputs).compile()
    yield {"gradient": clock.read()}
    run = lambda: jax.block_until_ready(gradient(model.params, model.state, inputs))  # noqa: E731
    finite = all(bool(jnp.isfinite(g).all()) for g in run().values())
    yield {"finite": finite, "gradient ms": fastest(run), "gradient MB": resident("VmHWM")}


PARTS = {"onnxruntime": run_onnxruntime, "jaxonnx": run_jaxonnx, "again": run_again}


def check(name: str, path: Path, folder: Path, gigabytes: float) -> None:
    """Run a part in this process, without measuring, as `main` would."""
    os.environ[CHECK] = "1"
    limit = int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with (folder / "answers").open("w") as answers:
        for figures in PARTS[name](path, folder):
            print(json.dumps(figures), file=answers, flush=True)


def main() -> None:
    name, path, folder = sys.argv[1:]
    results, sys.stdout = sys.stdout, sys.stderr  # what libraries print stays out of the answers
    for figures in PARTS[name](Path(path), Path(folder)):
        print(json.dumps(figures), file=results, flush=True)


if __name__ == "__main__":
    main()

"""The systems that are compared: each makes a function that runs a number of steps.

A step of training is forward, softmax cross-entropy, backward and Adam.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.networks import Network, batch

Run = Callable[[int], Any]
"""A function that runs so many steps and returns when the last has ended."""

LEARNING_RATE = 1e-3
LOSS = "softmax_cross_entropy_with_integer_labels"
FOREVER = 10**9
"""Steps of a phase that no benchmark leaves."""


def optax_step(train, guarded: bool = False) -> tuple[Callable, Any]:
    """Return `step(carry, x, y) -> (carry, loss)` and its optimizer.

    The carry is (params, state, the optimizer's state), of `train(params, state, x) -> (logits,
    state)`; if guarded, it stays where the loss or a gradient is not finite.
    """
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(LEARNING_RATE)

    def step(carry, x, y):
        params, state, memory = carry

        def objective(params):
            logits, renewed = train(params, state, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), renewed

        (loss, state), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        updates, memory = optimizer.update(gradients, memory, params)
        moved = optax.apply_updates(params, updates), state, memory
        if guarded:
            good = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves((loss, gradients))])
            moved = jax.tree.map(partial(jnp.where, good.all()), moved, carry)
        return moved, loss

    return step, optimizer


def _jax(phase, params, state, x, y, train, infer) -> tuple[Run, int]:
    """Return a run of `train(params, state, x) -> (logits, state)` or `infer(...) -> logits`."""
    import jax
    import jax.numpy as jnp

    parameters = sum(w.size for w in jax.tree.leaves(params))
    x, y = jnp.asarray(x), jnp.asarray(y)
    step, optimizer = optax_step(train)

    if phase == "forward":
        infer = jax.jit(infer)

        def forward(count):
            for _ in range(count):
                result = infer(params, state, x)
            jax.block_until_ready(result)

        forward.cost = lambda: cost(infer.lower(params, state, x))
        return forward, parameters

    carry = jax.tree.map(jnp.copy, (params, state, optimizer.init(params)))
    lowered = jax.jit(step, donate_argnums=0).lower(carry, x, y)
    compiled = lowered.compile()

    def training(count):
        nonlocal carry
        for _ in range(count):
            carry, loss = compiled(carry, x, y)
        jax.block_until_ready(loss)
        if not np.isfinite(loss):
            raise FloatingPointError("the loss is not finite")

    training.cost = lambda: cost(lowered, compiled)
    return training, parameters


def cost(lowered, compiled=None) -> dict[str, float]:
    """Return the operations of a program as written, and the bytes that it reads and writes."""
    costs = {"flops": lowered.cost_analysis()["flops"]}
    if compiled is not None:
        costs["bytes"] = compiled.cost_analysis()["bytes accessed"]
    return costs


def train_step(
    model, x, y, sparsity=None, precision=None, lora=None, platform=None
) -> tuple[Callable, Any, Any, Any]:
    """Return the function of a step of `jaxonnx.train`, and its arguments: state, batch, frozen.

    `lower_step` compiles it as `train` does.

    The epochs of `sparsity` are steps. With a platform they are for that one, and shapes only.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from jaxonnx.training import Batch
    from jaxonnx.training._settings import Settings
    from jaxonnx.training._step.build import build_step

    settings = Settings(
        loss=LOSS,
        optimizer=optax.adam(LEARNING_RATE),
        epochs=FOREVER,
        sparsity=sparsity,
        precision=precision,
        lora=lora,
    )
    one = build_step(model, settings, FOREVER, 1, platform=platform)
    state = one.init() if platform is None else jax.eval_shape(one.init)
    return one.update, state, Batch((x,), y, jnp.ones(len(x))), one.frozen


def lower_step(model, update, *arguments, precision=None):
    """Lower a step with the options of XLA that `jaxonnx.train` has for the network."""
    from jaxonnx.training._settings.precision import PRECISIONS

    dtype = PRECISIONS[precision] if precision else None
    jitted = model.program.jit(update, dtype, donate_argnums=0)
    return jitted.lower(jitted.trace(*arguments))


def all_trained(model):
    """Return the model with tables of positions as parameters.

    One that is added may be learned or not: the file does not tell.
    """
    tables = {n for n, v in model.state.items() if v.ndim == 2}
    return model.with_trainable(lambda name, _: name in model.params or name in tables)


def jaxonnx(network: Network, phase: str, path: Path, *, precision=None) -> tuple[Run, int]:
    """Return a run of the step of `jaxonnx.train`, or of calls of a model."""
    import jax
    import jax.numpy as jnp

    import jaxonnx
    from jaxonnx.training._settings.precision import round_products

    model = all_trained(jaxonnx.load(path))
    parameters = sum(w.size for w in model.params.values())
    x, y = (jnp.asarray(array) for array in batch(network))

    call = model
    if precision == "bf16":
        rounded = jax.jit(round_products(lambda p, s, x: model.apply(p, x, state=s), jnp.bfloat16))
        call = partial(rounded, model.params, model.state)

    def forward(count):
        for _ in range(count):
            result = call(x)
        jax.block_until_ready(result)

    if phase == "forward":
        return forward, parameters

    update, state, *rest = train_step(model, x, y, precision=precision)
    lowered = lower_step(model, update, state, *rest, precision=precision)
    compiled = lowered.compile()

    def training(count):
        nonlocal state
        for _ in range(count):
            state, seen = compiled(state, *rest)
        if not seen[1]:
            raise FloatingPointError("the loss or a gradient is not finite")

    training.cost = lambda: cost(lowered, compiled)
    return training, parameters


def flax_functions(network: Network) -> tuple[Callable, Callable, Callable]:
    """Return `init(key, x) -> (params, state)`, and `train` and `infer` as `_jax` takes them."""
    from benchmarks.layers.linen import Net

    net = Net(network)

    def init(key, x):
        variables = net.init(key, x, False)
        return variables.pop("params"), variables

    def train(params, state, x):
        return net.apply({"params": params, **state}, x, True, mutable=["batch_stats"])

    def infer(params, state, x):
        return net.apply({"params": params, **state}, x, False)

    return init, train, infer


def flax(network: Network, phase: str, path: Path) -> tuple[Run, int]:
    import jax

    x, y = batch(network)
    x = x.transpose(0, 2, 3, 1) if x.ndim == 4 else x
    init, train, infer = flax_functions(network)
    params, state = jax.jit(init)(jax.random.key(0), x)
    return _jax(phase, params, state, x, y, train, infer)


def pytorch(
    network: Network, phase: str, path: Path, *, channels_last=False, compiled=False, rounded=False
) -> tuple[Run, int]:
    """Return a run of PyTorch; on a GPU with products in TF32, as JAX has them, or in bfloat16."""
    import torch

    from benchmarks.layers.pytorch import build

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    precision = partial(torch.autocast, device, torch.bfloat16, enabled=rounded)
    compiler = os.environ.get("CXX", "g++")
    if compiled and device == "cpu" and shutil.which(compiler) is None:
        raise RuntimeError(f"torch.compile needs a C++ compiler, and there is no {compiler}")
    x, y = (torch.from_numpy(a).to(device) for a in batch(network))
    y = y.long()
    net = build(network, x.cpu()).to(device)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = sum(p.numel() for p in net.parameters())
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE, fused=True)
    net.train(phase == "train")
    call = torch.compile(net) if compiled else net
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def training(count):
        for _ in range(count):
            optimizer.zero_grad()
            with precision():
                loss = torch.nn.functional.cross_entropy(call(x), y)
            loss.backward()
            optimizer.step()
        wait()

    @torch.inference_mode()
    def forward(count):
        with precision():
            for _ in range(count):
                call(x)
        wait()

    return training if phase == "train" else forward, parameters


def onnxruntime(network: Network, phase: str, path: Path) -> tuple[Run, int]:
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {"x": batch(network)[0]}

    def forward(count):
        for _ in range(count):
            session.run(None, feeds)

    weights = onnx.load(path).graph.initializer
    return forward, sum(int(np.prod(w.dims)) for w in weights if w.data_type == 1)


class Exported:
    """A folder of `jaxonnx.export_step` in onnxruntime, with the state in its own memory."""

    def __init__(self, folder: Path):
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        manifest = json.loads((folder / "manifest.json").read_text())
        self._told = manifest["step"]
        session = partial(
            ort.InferenceSession, sess_options=options, providers=["CPUExecutionProvider"]
        )
        self._session = session(folder / "step.onnx")
        init = session(folder / "init.onnx")
        self._names = [value.name for value in self._session.get_outputs()]
        self._read = {value.name for value in self._session.get_inputs()}
        values = init.run_with_ort_values([value.name for value in init.get_outputs()], {})
        self._state = dict(zip(manifest["init"]["state"], values, strict=True))
        self._value = ort.OrtValue.ortvalue_from_numpy

    def step(self, x, y) -> float:
        """Train with a batch; return the loss before it."""
        arrays = x, y, np.ones(len(x), np.float32)
        batch = {n: self._value(a) for n, a in zip(self._told["batch"], arrays, strict=True)}
        feeds = {n: v for n, v in (self._state | batch).items() if n in self._read}
        values = self._session.run_with_ort_values(self._names, feeds)
        results = dict(zip(self._names, values, strict=True))
        self._state = {name: results[new] for name, new in self._told["state"].items()}
        return float(results[self._told["loss"]].numpy())

    def tensors(self) -> dict[str, np.ndarray]:
        return {name: value.numpy() for name, value in self._state.items()}


def exported(network: Network, phase: str, path: Path) -> tuple[Run, int]:
    """Return a run of the exported step; another process writes it, as it would for a phone."""
    folder = path.with_suffix(".step")
    subprocess.run([sys.executable, "-c", _EXPORT, path, folder], check=True)
    there = Exported(folder)
    x, y = batch(network)
    weights = json.loads((folder / "manifest.json").read_text())["params"]
    tensors = there.tensors()

    def training(count):
        for _ in range(count):
            loss = there.step(x, y)
        if not np.isfinite(loss):
            raise FloatingPointError("the loss is not finite")

    return training, sum(tensors[name].size for name in weights)


_EXPORT = """
import sys
from pathlib import Path
import optax, jaxonnx
from benchmarks.networks import NETWORKS, batch
from benchmarks.systems import LEARNING_RATE, LOSS, all_trained
path = Path(sys.argv[1])
model = all_trained(jaxonnx.load(path))
jaxonnx.export_step(
    model, sys.argv[2], batch(NETWORKS[path.stem]), LOSS, optax.adam(LEARNING_RATE)
)
"""


def onnxsim(network: Network, phase: str, path: Path) -> tuple[Run, int]:
    """Return a run for an environment of its own, of which `--sim-python` is the interpreter.

    The loss is an output of the file, of labels that are written out as ones and zeros.
    """
    import onnx
    import onnxsim as sim  # type: ignore[import-not-found]
    from onnx import helper

    model = onnx.load(path.with_suffix(".training.onnx"))
    graph = model.graph
    x, y = batch(network)
    (logits, *_) = graph.output
    axes = onnx.numpy_helper.from_array(np.array([1]), "loss.axes")
    graph.initializer.append(axes)
    graph.node.extend(
        [
            helper.make_node("Softmax", [logits.name], ["loss.p"], axis=-1),
            helper.make_node("Log", ["loss.p"], ["loss.log"]),
            helper.make_node("Mul", ["loss.log", "labels"], ["loss.chosen"]),
            helper.make_node("ReduceSum", ["loss.chosen", "loss.axes"], ["loss.each"], keepdims=0),
            helper.make_node("Neg", ["loss.each"], ["loss.minus"]),
            helper.make_node("ReduceMean", ["loss.minus"], ["loss"], keepdims=0),
        ]
    )
    graph.input.append(helper.make_tensor_value_info("labels", 1, [len(y), network.classes]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("loss", 1, []))
    for value in graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = len(y)
    model = onnx.shape_inference.infer_shapes(model)
    statistics = {
        name for n in graph.node if n.op_type == "BatchNormalization" for name in n.input[3:]
    }
    floats = [w for w in graph.initializer if w.data_type == 1 and w.dims]
    trained = [w.name for w in floats if w.name not in statistics]
    loop = sim.compile_training_loop(model, "loss", trained)
    feeds = {"x": x, "labels": np.eye(network.classes, dtype=np.float32)[y]}

    def training(count):
        for _ in range(count):
            loss = loop(feeds, lr=LEARNING_RATE)
        if not np.isfinite(loss):
            raise FloatingPointError("the loss is not finite")

    return training, sum(int(np.prod(w.dims)) for w in floats if w.name in trained)


def onnxruntime_training(network: Network, phase: str, path: Path) -> tuple[Run, int]:
    """Return a run for an environment of its own, of which `--ort-python` is the interpreter."""
    import onnx
    from onnxruntime.training import api, artifacts  # type: ignore[import-not-found]

    path = path.with_suffix(".training.onnx")
    model = onnx.load(path)
    statistics = {
        name
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:]
    }
    del model.graph.output[1:]  # it would compute the loss of every output
    floats = [w for w in model.graph.initializer if w.data_type == 1]
    trained = {w.name for w in floats if w.dims} - statistics
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    artifacts.generate_artifacts(
        model,
        requires_grad=sorted(trained),
        frozen_params=[w.name for w in floats if w.name not in trained],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    names = ("training_model.onnx", "optimizer_model.onnx")
    training_model, optimizer_model = (str(folder / name) for name in names)
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(training_model, state)
    optimizer = api.Optimizer(optimizer_model, module)
    x, y = batch(network)
    y = y.astype(np.int64)

    def training(count):
        module.train()
        for _ in range(count):
            module(x, y)
            optimizer.step()
            module.lazy_reset_grad()

    return training, sum(int(np.prod(w.dims)) for w in floats if w.name in trained)


SYSTEMS: dict[str, Callable[..., tuple[Run, int]]] = {
    "jaxonnx": jaxonnx,
    "jaxonnx-bf16": partial(jaxonnx, precision="bf16"),
    "flax": flax,
    "torch": pytorch,
    "torch-channels-last": partial(pytorch, channels_last=True),
    "torch-bf16": partial(pytorch, rounded=True),
    "torch-channels-last-bf16": partial(pytorch, channels_last=True, rounded=True),
    "torch-compile": partial(pytorch, compiled=True),
    "onnxruntime": onnxruntime,
    "onnxruntime-training": onnxruntime_training,
    "exported": exported,
    "onnxsim": onnxsim,
}


def applies(system: str, network: Network, phase: str) -> bool:
    """Check whether a system has this phase, and a form of its own for this network."""
    if system.startswith("torch-channels-last"):
        return len(network.shape) == 4
    only = {
        "onnxruntime": "forward",
        "onnxruntime-training": "train",
        "exported": "train",
        "onnxsim": "train",
    }
    return only.get(system, phase) == phase

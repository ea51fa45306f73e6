"""Every public call with wrong arguments: an error of jaxonnx must name what is wrong.

    python -m tests.fuzz.wrong_arguments [jaxonnx.train ...]    # prints what comes out

`CALLS` has a valid call of each documented function and method, and `find_names` lists those; each
argument in turn is replaced by each of the values of `WRONG`.
"""

import functools
import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxonnx
from jaxonnx import demo, docs, formats, loggers, losses, optim, sparse, training
from tests.support.paths import DATA
from tests.support.tiny_networks import LABELS, examples, mlp

WRONG: dict[str, Any] = {
    "None": None,
    "3": 3,
    "-1": -1,
    "nan": float("nan"),
    "'text'": "text",
    "''": "",
    "b'bytes'": b"bytes",
    "[]": [],
    "[1]": [1],
    "{}": {},
    "{'a': 1}": {"a": 1},
    "object()": object(),
    "a scalar": np.zeros((), np.float32),
    "a vector": np.zeros(3, np.float32),
    "a matrix": np.zeros((2, 2), np.int32),
    "five axes": np.zeros((1, 2, 1, 1, 2), np.float32),
}
"""Wrong values by their text; a call may take those that are right for it."""


class Nothing(training.Data):
    """A kind of data that nothing is of."""

    @classmethod
    def accepts(cls, data: Any, labels: bool) -> bool:
        return False


class Call:
    """A valid call: what makes the function, and its arguments by name.

    An argument that is callable is called for its value, when it is needed.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]], **arguments: Any):
        self.make, self.arguments = make, arguments

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        found = inspect.signature(self.make()).parameters.items()
        return {name: p for name, p in found if p.kind is not p.VAR_KEYWORD}

    def __call__(self, name: str, value: Any) -> Any:
        """Call the function, with a value for one argument."""
        made = {n: x() if callable(x) else x for n, x in self.arguments.items()}
        made[name] = value
        positional, named = [], {}
        for key, parameter in self.parameters.items():
            if key in made and parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.POSITIONAL_ONLY,
            ):
                positional.append(made[key])
            elif key in made:
                named[key] = made[key]
        before = [n for n in named if self._is_before_positional(n)]
        function = self.make()
        return function(*(named.pop(n) for n in before), *positional, **named)

    def _is_before_positional(self, name: str) -> bool:
        """Whether an argument stands before `*arguments`."""
        names = [*self.parameters]
        several = [n for n, p in self.parameters.items() if p.kind is p.VAR_POSITIONAL]
        return any(names.index(name) < names.index(n) for n in several)


@functools.cache
def net() -> jaxonnx.Model:
    return jaxonnx.load(mlp())


@functools.cache
def with_dropout() -> jaxonnx.Model:
    return jaxonnx.load(mlp(dropout=True))


@functools.cache
def cnn() -> jaxonnx.Model:
    return demo.model()


@functools.cache
def decoder() -> jaxonnx.Model:
    return jaxonnx.load(DATA / "llm" / "qwen3-genai")


@functools.cache
def adapted() -> jaxonnx.Model:
    return jaxonnx.LoRA(rank=2).attach(net(), jax.random.key(0))


@functools.cache
def adapters() -> jaxonnx.Adapters:
    return jaxonnx.Adapters.of(adapted())


@functools.cache
def result() -> jaxonnx.Result:
    return jaxonnx.train(net(), DATASET, **TRAINING)


@functools.cache
def sensitivity() -> jaxonnx.Sensitivity:
    return jaxonnx.sensitivity(net(), X, ("int8",))


@functools.cache
def step() -> training.Step:
    return training.step(net(), loss=LABELS, optimizer="adam", metrics="accuracy")


@functools.cache
def state() -> training.State:
    return step().init()


@functools.cache
def file_with_training() -> Any:
    return jaxonnx.add_training(net(), loss="squared_error", optimizer=adam())


def file_step() -> Any:
    return jaxonnx.load(file_with_training()).training


@functools.cache
def flax_module() -> Any:
    return jaxonnx.flax.Module(net())


@functools.cache
def pruned() -> dict[str, Any]:
    return sparse.prune({"w": W})


@functools.cache
def packed() -> Any:
    return sparse.pack(pruned()["w"])


@functools.cache
def halves() -> Any:
    w = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float16)
    return sparse.pack(sparse.prune({"w": w})["w"])


@functools.cache
def cutlass() -> Any:
    return sparse.to_cutlass(halves())


@functools.cache
def sparse_net() -> Any:
    return net().replace(params=sparse.prune(params())).with_sparsity()


@functools.cache
def sparse_state() -> Any:
    return sparse.fixed_mask(optax.sgd(0.1)).init({"w": W})


@functools.cache
def exported() -> Path:
    path = Path(tempfile.mkdtemp()) / "step"
    jaxonnx.export_step(net(), path, (X[:2], Y[:2]), loss=LABELS, optimizer="adam")
    return path


def make_module(model: Any, deterministic: Any = True, rngs: Any = None) -> Any:
    return jaxonnx.flax.Module(model, deterministic=deterministic, rngs=rngs)


def double(x: Any) -> Any:
    return x * 2


def mesh() -> Any:
    return jax.make_mesh((1,), ("data",))


def file_batch() -> Any:
    return {"x": X[:2], "target": np.zeros((2, 4), np.float32)}


DATASET = X, Y = examples(16)
W = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
KEY = jax.random.key(0)
TRAINING = {"loss": LABELS, "optimizer": "adam", "batch_size": 8, "progress": False}
"""Settings of the runs that a wrong argument does not stop."""


def calls(prefix: str, make: Callable[[], Any], **methods: dict[str, Any]) -> dict[str, Call]:
    """Return the calls of methods of an object."""
    return {
        f"{prefix}.{name}": Call(lambda name=name: getattr(make(), name), **arguments)
        for name, arguments in methods.items()
    }


def params() -> dict[str, Any]:
    return dict(net().params)


def in_folder(name: str) -> Callable[[], Path]:
    """Return what makes the path of a file in a new folder."""
    return lambda: Path(tempfile.mkdtemp()) / name


def adam() -> Any:
    return optim.adam(0.1)


def sgd() -> Any:
    return optax.sgd(0.1)


RUN = {"model": net, "data": DATASET, **TRAINING}
WEIGHTS = {"params": {"w": W}}
LOGITS = {"outputs": np.ones((2, 4), np.float32), "targets": np.zeros(2, int)}
CALLS: dict[str, Call] = {
    "jaxonnx.add_training": Call(
        lambda: jaxonnx.add_training, model=net, loss="squared_error", optimizer=adam
    ),
    "jaxonnx.evaluate": Call(
        lambda: jaxonnx.evaluate, model=net, data=DATASET, loss=LABELS, progress=False
    ),
    "jaxonnx.export_safetensors": Call(
        lambda: jaxonnx.export_safetensors, model=net, folder=in_folder("hf")
    ),
    "jaxonnx.Result.save": Call(lambda: result().save, folder=in_folder("tuned")),
    "jaxonnx.export_step": Call(
        lambda: jaxonnx.export_step,
        model=net,
        path=in_folder("step"),
        batch=(X[:2], Y[:2]),
        loss=LABELS,
        optimizer="adam",
    ),
    "jaxonnx.average_states": Call(
        lambda: jaxonnx.average_states,
        folder=exported,
        states=lambda: [params(), params()],
        weights=[1, 2],
    ),
    "jaxonnx.import_step": Call(
        lambda: jaxonnx.import_step, model=net, folder=exported, state=params
    ),
    "jaxonnx.kernels_first": Call(lambda: jaxonnx.kernels_first, params=params),
    "jaxonnx.labels": Call(lambda: jaxonnx.labels, groups={"w": ".*"}, default="x", model=net),
    "jaxonnx.load": Call(lambda: jaxonnx.load, source=mlp),
    "jaxonnx.convert": Call(lambda: jaxonnx.convert, model=net),
    "jaxonnx.quantize": Call(lambda: jaxonnx.quantize, model=net, data=X),
    "jaxonnx.sensitivity": Call(lambda: jaxonnx.sensitivity, model=net, data=X, types=("int8",)),
    "jaxonnx.stack": Call(lambda: jaxonnx.stack, models=lambda: [net(), net()]),
    "jaxonnx.Stack.member": Call(lambda: jaxonnx.stack([net()]).member, index=0),
    "jaxonnx.to_onnx": Call(lambda: jaxonnx.to_onnx, function=lambda: double, examples=W),
    "jaxonnx.train": Call(lambda: jaxonnx.train, **RUN),
    "jaxonnx.validate": Call(lambda: jaxonnx.validate, model=net),
    "jaxonnx.LoRA": Call(lambda: jaxonnx.LoRA),
    "jaxonnx.Quantization": Call(lambda: jaxonnx.Quantization),
    "jaxonnx.find_rate": Call(
        lambda: jaxonnx.find_rate, model=net, data=DATASET, steps=3, loss=LABELS
    ),
    "jaxonnx.training.optimizer": Call(lambda: training.optimizer),
    "jaxonnx.training.preview": Call(lambda: training.preview, **RUN),
    "jaxonnx.training.step": Call(lambda: training.step, model=net, loss=LABELS, optimizer="adam"),
    "jaxonnx.training.read_training_checkpoint": Call(
        lambda: training.read_training_checkpoint, path="none"
    ),
    "jaxonnx.training.restore_checkpoint": Call(
        lambda: training.restore_checkpoint, step=step, path="none"
    ),
    "jaxonnx.training.register_data": Call(lambda: training.register_data, kind=lambda: Nothing),
    "jaxonnx.formats.register": Call(lambda: formats.register, kind=lambda: formats.Format),
    "jaxonnx.formats.read_proto": Call(
        lambda: formats.read_proto, proto=lambda: demo.mlp().to_onnx()
    ),
    "jaxonnx.losses.register": Call(
        lambda: losses.register, name="of one's own", loss=lambda: losses.Loss(), also_called=""
    ),
    "jaxonnx.losses.shift_right": Call(
        lambda: losses.shift_right, labels=np.zeros((1, 3), int), start=0, padding=0
    ),
    "jaxonnx.sparse.from_cutlass": Call(
        lambda: sparse.from_cutlass, values=lambda: cutlass()[0], metadata=lambda: cutlass()[1]
    ),
    "jaxonnx.sparse.layers": Call(lambda: sparse.layers, **WEIGHTS),
    "jaxonnx.sparse.load": Call(lambda: sparse.load, path="none"),
    "jaxonnx.sparse.mask": Call(lambda: sparse.mask, w=W),
    "jaxonnx.sparse.metrics": Call(lambda: sparse.metrics, opt_state=sparse_state),
    "jaxonnx.sparse.pack": Call(lambda: sparse.pack, w=lambda: pruned()["w"]),
    "jaxonnx.sparse.plot_masks": Call(lambda: sparse.plot_masks, source=sparse_net),
    "jaxonnx.sparse.prune": Call(lambda: sparse.prune, **WEIGHTS),
    "jaxonnx.sparse.record": Call(lambda: sparse.record, model=sparse_net),
    "jaxonnx.sparse.save": Call(
        lambda: sparse.save,
        path=in_folder("masks.npz"),
        params=pruned,
        masks=lambda: {"w": sparse.mask(W)},
        layers=lambda: sparse.layers({"w": W}),
    ),
    "jaxonnx.sparse.sparse_products": Call(
        lambda: sparse.sparse_products, function=lambda: double, weights={}
    ),
    "jaxonnx.sparse.state_masks": Call(lambda: sparse.state_masks, opt_state=sparse_state),
    "jaxonnx.sparse.to_cutlass": Call(
        lambda: sparse.to_cutlass, packed=lambda: sparse.pack(pruned()["w"].astype(np.float16))
    ),
    "jaxonnx.sparse.unpack": Call(lambda: sparse.unpack, packed=packed),
    "jaxonnx.sparse.unpack_mask": Call(lambda: sparse.unpack_mask, packed=packed),
    "jaxonnx.sparse.verify": Call(lambda: sparse.verify, function=sparse_net),
    "jaxonnx.sparse.fixed_mask": Call(lambda: sparse.fixed_mask, inner=sgd),
    "jaxonnx.sparse.s_ste": Call(lambda: sparse.s_ste, inner=sgd),
    "jaxonnx.sparse.sr_ste": Call(lambda: sparse.sr_ste, inner=sgd),
    "jaxonnx.sparse.three_phase": Call(
        lambda: sparse.three_phase, inner=sgd, dense=1, dynamic=1, refresh=1
    ),
    "jaxonnx.flax.Module.__init__": Call(lambda: make_module, model=net),
}
CALLS |= {
    f"jaxonnx.losses.{name}": Call(lambda name=name: getattr(losses, name))
    for name in (
        "causal_lm",
        "cross_entropy",
        "distill",
        "dpo",
        "in_batch_negatives",
        "kto",
        "masked_lm",
        "negative_log_likelihood",
        "orpo",
        "seq2seq_lm",
    )
}
CALLS |= {
    f"jaxonnx.loggers.{name}": Call(lambda name=name: getattr(loggers, name), path=in_folder("log"))
    for name in ("csv", "jsonl")
}
CALLS["jaxonnx.loggers.tensorboard"] = Call(lambda: loggers.tensorboard, folder=in_folder("log"))
CALLS |= {
    f"jaxonnx.optim.{name}": Call(lambda name=name: getattr(optim, name), learning_rate=0.1)
    for name in ("adam", "adagrad", "momentum")
}
CALLS |= calls(
    "jaxonnx.Adapters",
    adapters,
    are_apart={"model": adapted},
    apply={"model": net},
    attach={"model": net},
    save={"path": in_folder("a.npz")},
)
CALLS |= calls("jaxonnx.LoRA", lambda: jaxonnx.LoRA(rank=2), attach={"model": net, "rng": KEY})
CALLS |= calls("jaxonnx.Result", result, report={"path": in_folder("run.html")})
CALLS |= calls(
    "jaxonnx.Model",
    net,
    __call__={"inputs": X},
    apply={"params": params, "inputs": X},
    apply_train={"params": params, "state": {}, "rng": KEY, "inputs": X},
    predict={"data": X},
    replace={},
    reinitialize={"rng": KEY, "names": ".*"},
    with_outputs={"outputs": "y"},
    with_inputs={"inputs": "a"},
    split={"values": "a"},
    with_head={"classes": 3},
    then={"function": lambda: double},
    with_fixed_inputs={"values": {}},
    with_trainable={"trainable": ".*"},
    with_statistics={"statistics": "batch"},
    with_sparsity={},
    merge_adapters={},
    to_onnx={},
    save={"path": in_folder("net.onnx")},
    shardings={"mesh": mesh},
)
CALLS |= calls("jaxonnx.Model", with_dropout, with_dropout={"ratio": 0.5})
CALLS |= calls(
    "jaxonnx.Model", cnn, recompute_statistics={"data": np.zeros((4, 1, 8, 8), np.float32)}
)
CALLS |= calls(
    "jaxonnx.Model",
    decoder,
    generate={"prompts": np.array([1, 2]), "max_new_tokens": 2},
    with_tokens={"tokens": ["<new>"]},
)
CALLS |= calls(
    "jaxonnx.training_info.Training",
    file_step,
    init={"key": KEY},
    step={"state": lambda: file_step().state, "batch": file_batch, "key": KEY},
    inference={"state": lambda: file_step().state, "inputs": {"x": X[:2]}, "key": KEY},
    to_onnx={"state": lambda: file_step().state},
)
CALLS |= calls(
    "jaxonnx.flax.Module", flax_module, __call__={"inputs": X}, set_view={"deterministic": True}
)

PROTOCOL = "are pure functions of pytrees for loops of one's own, which JAX checks"
PLOT = "draws into axes of matplotlib"
TRACED = "mathematics of arrays, which JAX checks"
SERVICE = "goes to a service, whose package or network is not there; tested with stand-ins"
OF_PATTERNS = "is written for a pattern of one's own, and called by jaxonnx"
OF_FORMATS = "is written for a format of one's own, and called by jaxonnx"
OF_DATA = "is written for a kind of data of one's own, and called by jaxonnx"
NOT_CALLED = {
    **dict.fromkeys(("jaxonnx.loggers.mlflow", "jaxonnx.loggers.wandb"), SERVICE),
    "jaxonnx.push_to_hub": SERVICE,
    "jaxonnx.Adapters.to_inputs": "as numpy.dtype",
    "jaxonnx.History.plot": PLOT,
    "jaxonnx.Sensitivity.plot": PLOT,
    "jaxonnx.training.ConfusionMatrix.plot": PLOT,
    "jaxonnx.training.Curves.plot": PLOT,
    "jaxonnx.training.PerClass.plot": PLOT,
    "jaxonnx.RateCurve.plot": PLOT,
    "jaxonnx.formats.Companion": OF_FORMATS,
    "jaxonnx.formats.File": OF_FORMATS,
    "jaxonnx.formats.Format": OF_FORMATS,
    "jaxonnx.training.Data": OF_DATA,
    "jaxonnx.training.Reading": OF_DATA,
    "jaxonnx.training.State.replace": "that of dataclasses",
    "jaxonnx.losses.ClassLoss": PROTOCOL,
    "jaxonnx.losses.Distillation": PROTOCOL,
    "jaxonnx.losses.Loss": PROTOCOL,
    "jaxonnx.losses.PreferenceLoss": PROTOCOL,
    "jaxonnx.losses.log_likelihoods": TRACED,
    "jaxonnx.optim.adam_rule": TRACED,
    "jaxonnx.optim.adagrad_rule": TRACED,
    "jaxonnx.optim.momentum_rule": TRACED,
    "jaxonnx.optim.as_attribute": "as numpy.float32",
    "jaxonnx.sparse.Pattern": OF_PATTERNS,
    "jaxonnx.sparse.SparsityPattern": OF_PATTERNS,
    "jaxonnx.sparse.register": OF_PATTERNS,
    "jaxonnx.sparse.register_products": OF_PATTERNS,
    "jaxonnx.onnx_out": "decorates rules for primitives of one's own",
    "jaxonnx.training.Step": PROTOCOL,
    "jaxonnx.Model.name_outputs": "names whatever a call returned",
    "jaxonnx.training_info.Training.__init__": "Model.training makes one",
}
"""Documented names without a call, or beginnings of them, and why."""


ALSO = {
    "model": ("file",),
    "w": ("weight",),
    "web": ("batch",),
    "data": ("input", "examples", "iterable"),
    "names": ("name",),
    "examples": ("example",),
    "types": ("scheme",),
    "tokens": ("token",),
    "scheme": ("jaxonnx.Quantization",),
    "learning_rate": ("rate",),
    "inputs": ("input", "the parameters"),
    "opt_state": ("optimizer state",),
    "params": ("weight", "parameter", "no layer"),
    "source": ("model", "no layer"),
    "layers": ("no layer", "no such sparse weight"),
    "pattern": ("no weight", "selects no parameter"),
    "masks": ("a mask",),
    "values": ("fixed",),
    "function": ("a model", "an ONNX model"),
    "metrics": ("metric",),
    "trainable": ("no parameter is to be trained",),
    "dropout": ("Dropout",),
}
"""Words that name an argument in messages, besides its own name."""


def find_names() -> Iterator[str]:
    """Yield the documented functions and methods that take arguments."""
    for _, values in docs.public_names():
        for name, value in values.items():
            if inspect.isclass(value) and issubclass(value, Exception):
                continue
            members = {name: value}
            if inspect.isclass(value):
                inner = [item for one in docs._classes(value) for item in vars(one).items()]
                members = {
                    f"{name}.{n}": f
                    for n, f in inner
                    if inspect.isfunction(f) and f.__doc__
                    if n in ("__call__", "__init__") or not n.startswith("_")
                }
            for member, function in members.items():
                if {*inspect.signature(function).parameters} - {"self"}:
                    yield member


def find_fault(name: str, argument: str, label: str) -> str:
    """Make a call with a wrong argument; return what is wrong with its error, "" if nothing is."""
    value = WRONG[label]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            CALLS[name](argument, value)
        except OSError:
            return ""  # documented, of files
        except jaxonnx.Error as error:
            words = (argument, argument.replace("_", " "), str(value), *ALSO.get(argument, ()))
            if any(word in str(error) for word in words):
                return ""
            return f"{name}({argument}={label}) does not name it: {error}"
        except Exception as error:  # noqa: BLE001 - any other error is the fault
            return f"{name}({argument}={label}) raises {type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    for call in sys.argv[1:] or CALLS:
        for one in CALLS[call].parameters:
            for text in WRONG:
                if fault := find_fault(call, one, text):
                    print(fault, flush=True)

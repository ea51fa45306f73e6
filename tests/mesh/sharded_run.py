"""Runs on eight devices against one, in processes of their own (`test_sharding.py`).

python -m tests.mesh.sharded_run FOLDER CASE...
"""

import gc
import re
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from onnx import TensorProto, helper

import jaxonnx
from jaxonnx import demo
from jaxonnx.lowering import has_units
from jaxonnx.sparse._products import _cpu
from jaxonnx.training import _checkpoints as checkpoints
from tests.support.few_bit_files import MS, network, normal, raw
from tests.support.paths import DATA
from tests.support.tiny_networks import LABELS

MOMENTUM = optax.sgd(0.05, momentum=0.9)


def mesh():
    """The axes are explicit, as `jax.make_mesh` makes them."""
    return jax.make_mesh((4, 2), ("data", "model"))


def halves(name, shape):
    """The last axis over "model", the one before over "data", where they divide."""
    last = "model" if shape and shape[-1] % 2 == 0 else None
    first = "data" if len(shape) > 1 and shape[-2] % 4 == 0 else None
    return P(*(None,) * (len(shape) - 2), *(first, last)[-len(shape) :]) if shape else P()


SHARDINGS = {"data": "data", "fsdp": "fsdp", "tensor": "tensor", "own": halves}


def batches(model, count=3, size=16):
    """Random inputs, and labels of ten classes."""
    random = np.random.default_rng(0)
    (value,) = model.inputs
    shape = (count * size, *value.shape[1:])
    whole = np.issubdtype(value.dtype, np.integer)
    x = random.integers(0, 50, shape) if whole else random.normal(size=shape)
    return x.astype(jax.dtypes.canonicalize_dtype(value.dtype)), random.integers(0, 10, len(x))


def train(model, data, **settings):
    settings = {"loss": LABELS, "optimizer": MOMENTUM, "batch_size": 16} | settings
    if settings.pop("validated", True):
        settings["validation"] = tuple(x[5:41] for x in data)  # its last batch is filled up
    return jaxonnx.train(model, data, progress=False, **settings)


def spread(model, sharding, on):
    """Check that each tensor of a model lies where the table of the model says."""
    for name, spec in model.shardings(on, sharding).specs.items():
        x = {**model.params, **model.state}[name]
        wanted = jax.NamedSharding(on, spec)
        assert x.sharding.is_equivalent_to(wanted, x.ndim), (name, x.sharding, spec)


def close(result, alone, rtol=1e-3):
    np.testing.assert_allclose(result.history.losses, alone.history.losses, rtol=1e-5)
    for row, other in zip(result.history.epochs, alone.history.epochs, strict=True):
        for name in {"loss", "validation_loss", "validation_accuracy"} & row.keys():
            np.testing.assert_allclose(row[name], other[name], rtol=1e-4)
    tensors, others = ({**r.model.params, **r.model.state} for r in (result, alone))
    assert tensors.keys() == others.keys()
    for name, x in tensors.items():
        np.testing.assert_allclose(x, others[name], rtol=rtol, atol=2e-5, err_msg=name)


def compared(model, shardings, check=close, validated=True, **settings):
    data = batches(model)
    alone = train(model, data, validated=validated, **settings)
    for name in shardings:
        sharding, now = SHARDINGS[name], validated and name == shardings[0]  # that is compiled, too
        result = train(model, data, mesh=mesh(), sharding=sharding, validated=now, **settings)
        assert now == ("validation_accuracy" in result.history.epochs[-1])
        check(result, alone)
        if "lora" not in settings:  # which is merged
            spread(result.model, sharding, mesh())


def load(name):
    return jaxonnx.load(DATA / f"{name}.legacy.onnx")


def cnn(folder):
    compared(load("lenet_bn"), ("fsdp",))


def scalar(folder):
    """A short batch of examples that the devices cannot share is without its fill there, too."""

    def mean(outputs, targets):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    model = demo.mlp(32)
    data = tuple(x[:45] for x in batches(model))  # three batches, of which the last has 13
    alone = train(model, data)
    close(train(model, data, mesh=mesh(), loss=mean, metrics=["accuracy"]), alone)
    close(train(model, data, loss=mean, metrics=["accuracy"]), alone)


def transformer(folder):
    model = load("transformer")
    specs = model.shardings(mesh(), "tensor").specs
    split = [name for name, spec in specs.items() if any(spec)]
    # two blocks: queries, keys and values, which lie beside each other; what is made of them; two
    # layers of a perceptron; and the biases before the second product of each pair
    assert len(split) == 2 * (2 + 1 + 2 + 1), split
    compared(model, ("tensor",))


def lstm(folder):
    model = load("lstm")
    compared(model, ("own",))
    refused("splits nothing of this model: no product", model.shardings, mesh(), "tensor")


def lora(folder):
    def check(result, alone):
        close(result, alone)
        for name, x in result.lora.values.items():
            np.testing.assert_allclose(x, alone.lora.values[name], rtol=1e-3, atol=2e-5)

    settings = {"lora": jaxonnx.LoRA(rank=4), "optimizer": optax.adam(1e-2)}
    compared(demo.mlp(128), ("tensor",), check, **settings)


def two_products(kind, size=256):
    """A file of two products with matrices w0 and w1 in few bits, and an activation between."""
    nodes, tensors, types = [], {}, {}
    for i, (x, y) in enumerate((("x", "h"), ("r", "y"))):
        w, s, z = f"w{i}", f"s{i}", f"z{i}"
        sizes = {"K": size, "N": size, "block_size": 16}
        node = partial(helper.make_node, outputs=[y], domain=MS)
        if kind == "MatMulNBits":
            tensors |= {w: raw(size, size // 16, 8), s: 0.05 * normal(size, size // 16)}
            tensors[z] = raw(size, -(-size // 32))
            nodes.append(node(kind, [x, w, s, z], bits=4, **sizes))
        elif kind == "MatMulBnb4":
            tensors |= {w: raw(size * size // 2, 1), s: 0.05 * normal(size * size // 16)}
            nodes.append(node(kind, [x, w, s], quant_type=1, **sizes))
        elif kind == "DynamicQuantizeMatMul":
            tensors |= {w: raw(size, size), s: 1e-3 * normal(size), z: raw(size)}
            nodes.append(node(kind, [x, w, s, z]))
        else:
            codes = (raw(size, size) % 16).astype(np.int8) - 8
            tensors |= {w: codes, s: 0.05 * normal(size // 16, size)}
            types[w] = TensorProto.INT4
            options = {"axis": 0, "block_size": 16}
            nodes.append(helper.make_node(kind, [w, s], [f"d{i}"], **options))
            nodes.append(helper.make_node("MatMul", [x, f"d{i}"], [y]))
        nodes.append(helper.make_node("Relu", ["h"], ["r"]))
    nodes.pop()
    return network(nodes, ("x", TensorProto.FLOAT, ["n", size]), types, **tensors)


def few_bits(folder):
    """A matrix in few bits is one entry; its tensors are split alike, and results are the same."""
    turned = {"w0": P(None, "model"), "w1": P("model")}
    expected = {  # by "tensor", and of what codes, scales and zero points are split with them
        "MatMulNBits": ({"w0": P("model"), "w1": P(None, "model")}, {"s1": P(None, "model")}),
        "DequantizeLinear": (turned, {"s0": P(None, "model"), "s1": P("model")}),
        "DynamicQuantizeMatMul": (turned, {}),  # small ones stay whole
        "MatMulBnb4": ({"w0": P("model")}, {"s0": P("model")}),
    }
    random = np.random.default_rng(0)
    data = tuple(random.normal(size=(32, 256)).astype(np.float32) for _ in range(2))
    settings = {"loss": "squared_error", "batch_size": 16, "optimizer": optax.adam(1e-2)}
    settings["lora"] = jaxonnx.LoRA(4, where="w*")
    for kind, (wanted, beside) in expected.items():
        model = jaxonnx.load(proto := two_products(kind))
        rules: Any = "tensor"
        if kind == "MatMulBnb4":  # lies in one row, whose blocks an input has in all places
            words = r"do not divide 'w1' \[256, 256\] along axis 1 \(of 1\)"
            refused(words, model.shardings, mesh(), "tensor")
            rules = wanted
        table = model.shardings(mesh(), rules)
        assert {x.name: x.shape for x in table.tensors} == dict.fromkeys(("w0", "w1"), (256, 256))
        assert {n: s for n, s in table.specs.items() if any(s)} == wanted
        laid = jaxonnx.load(proto, mesh=mesh(), sharding=rules).state
        assert {n: laid[n].sharding.spec for n in beside} == beside
        assert table.size == size(laid) + 4
        split = jaxonnx.load(proto, mesh=mesh(), sharding="fsdp")
        np.testing.assert_allclose(split(data[0]), model(data[0]), rtol=1e-3, atol=1e-3)
        alone = jaxonnx.train(model, data, progress=False, **settings)
        for sharding in ("fsdp", rules) if kind == "MatMulNBits" else (rules,):
            on = {"mesh": mesh(), "sharding": sharding}
            result = jaxonnx.train(model, data, progress=False, **settings, **on)
            np.testing.assert_allclose(result.history.losses, alone.history.losses, rtol=1e-4)
            for name, x in result.lora.values.items():
                np.testing.assert_allclose(x, alone.lora.values[name], rtol=1e-3, atol=1e-4)
            spread(result.model, sharding, mesh())
    model = jaxonnx.load(two_products("MatMulNBits"))
    refused("rule 's0' matches no tensor", model.shardings, mesh(), {"s0": P("model")})
    adapted = settings["lora"].attach(model, jax.random.key(0))
    on = {"mesh": mesh(), "sharding": "tensor"}
    step: Any = jaxonnx.training.step(adapted, "squared_error", optax.adam(1e-2), **on)
    lowered = jax.jit(step.update).lower(step.init(), data, step.frozen)
    assert not re.search(r"u8\[\S+ all-gather", text := lowered.compile().as_text())
    assert "all-reduce" in text
    words = "axis 1 of length 48 in 3 blocks does not divide into 2 parts; axis 0 .48. would"
    small = jaxonnx.load(two_products("MatMulNBits", 48))
    small = jaxonnx.LoRA(4, where="w*").attach(small, jax.random.key(0))  # else they are constants
    refused(words, small.shardings, mesh(), {"w0": P(None, "model")})


def decoder(folder):
    """A file of onnxruntime-genai: projections of attention and perceptron are split in pairs."""
    model = jaxonnx.load(DATA / "llm" / "qwen3-genai")
    specs = model.shardings(mesh(), "tensor").specs
    split = {
        name.removeprefix("model.layers.").partition(".")[2] for name in specs if any(specs[name])
    }
    assert {"mlp.gate_proj.MatMul.weight", "mlp.down_proj.MatMul.weight"} <= split, split
    data = {"input_ids": np.random.default_rng(0).integers(3, 192, (16, 12))}
    settings = {"loss": "causal_lm", "batch_size": 8, "epochs": 1, "optimizer": MOMENTUM}
    alone = jaxonnx.train(model, data, progress=False, **settings)
    on = {"mesh": mesh(), "sharding": "tensor"}
    result = jaxonnx.train(model, data, progress=False, **settings, **on)
    close(result, alone)
    spread(result.model, "tensor", mesh())


def sparse(folder):
    def check(result, alone):
        close(result, alone)
        for name, x in result.model.params.items():
            np.testing.assert_array_equal(
                np.asarray(x) == 0, np.asarray(alone.model.params[name]) == 0
            )

    phases = {"pattern": "2:4", "dense": 1, "dynamic": 2}
    compared(demo.mlp(128), ("tensor",), check, sparsity=phases, epochs=4, validated=False)
    compared(demo.model(), ("fsdp",), check, sparsity=phases, epochs=4)  # kernels first
    # products are sparse on one device (where there is a compiler), on a mesh dense, with a note
    phases = {"pattern": "2:4", "dense": 0, "dynamic": 1, "products": "sparse"}
    settings = {"sparsity": phases, "epochs": 2, "validated": False}
    with (
        mock.patch.object(_cpu, "LEAST_ROWS", ((4, 1),)),
        pytest.warns(UserWarning, match="products stay dense: XLA cannot split their kernels"),
    ):
        compared(demo.mlp(128), ("tensor",), check, **settings)


def average(folder):
    settings = {"ema": 0.9, "accumulate": 2, "remat": True, "trainable": ".*weight"}
    compared(demo.mlp(128), ("own",), epochs=2, **settings)

    model = demo.mlp(128)
    exact = train(model, batches(model), validated=False)

    def check(result, alone):
        """Both runs are as near to float32 as numbers of 8 bits are, where products of this size
        stay in it; without units for bfloat16 both round all products, and are as near to another.
        """
        eps = float(jnp.finfo(jnp.bfloat16).eps)
        units = has_units(jnp.dtype(jnp.bfloat16))
        expected = exact if units else alone
        for one in (result, alone) if units else (result,):
            np.testing.assert_allclose(one.history.losses, expected.history.losses, rtol=1e-4)
            for name, x in expected.model.params.items():
                off = np.linalg.norm(one.model.params[name] - x)
                assert off < eps * np.linalg.norm(x - model.params[name]), name

    compared(model, ("fsdp",), check, False, precision="bf16")


def carried(folder):
    """A file's own algorithm, and a run that is interrupted and goes on with other devices."""
    proto = jaxonnx.add_training(demo.mlp(128), loss=LABELS, optimizer=jaxonnx.optim.adam(1e-3))
    data = batches(demo.mlp())
    settings = {"loss": None, "optimizer": None, "metrics": ["accuracy"]}
    sharded = {"mesh": mesh(), "sharding": "fsdp"}
    with pytest.raises(jaxonnx.TrainingError, match="or a mesh, takes batches of 16, of which one"):
        train(jaxonnx.load(proto), data, **sharded, **settings)
    # such an algorithm has no weights of examples, by which fill would not count
    settings |= {"validated": False, "validation": tuple(x[:32] for x in data)}
    alone = train(jaxonnx.load(proto), data, **settings)
    close(train(jaxonnx.load(proto), data, **sharded, **settings), alone)


def resumed(folder):
    """Checkpoints know of no mesh; the best epoch counts."""
    model, settings = demo.mlp(128), {"epochs": 3, "patience": 5, "ema": 0.9}
    settings["trainable"] = lambda name, _: name != "body_weight"  # frozen, and split
    data = batches(model)
    alone = train(model, data, **settings)
    for at, (on, sharding) in enumerate([(mesh(), "fsdp"), ("all", "data"), (None, None)], 1):
        result = train(
            model,
            data,
            **settings | {"epochs": at},
            mesh=on,
            sharding=sharding,
            checkpoint_dir=folder,
            resume=True,
        )
    close(result, alone)


def size(tree):
    """Bytes on the first device."""
    shards = (s for x in jax.tree.leaves(tree) for s in x.addressable_shards)
    return sum(s.data.nbytes for s in shards if s.device == jax.devices()[0])


def apart(folder):
    """Nothing that is split is whole on a device, nor on the host but where a file is put together.

    On a device it is looked for when the tensors are read, after each step and in each checkpoint,
    on the host in all that NumPy is asked for.
    """
    kind: Any = type(jax.numpy.zeros(0))
    for number, make in enumerate((partial(demo.mlp, 8192), demo.model)):
        model = make()
        model.save(path := folder / f"{number}.onnx")
        data, large = batches(model), max(x.size for x in model.params.values())
        del model
        shares, gathered = [], []

        def look(*_, large=large, shares=shares):
            found = [x for x in jax.live_arrays() if x.size == large and x.dtype == np.float32]
            shares.extend(s.data.size / large for x in found for s in x.addressable_shards)

        def array(x, *args, large=large, gathered=gathered, real=kind.__array__, **kwargs):
            if x.size == large and not x.is_fully_replicated:
                gathered.append({frame.name for frame in traceback.extract_stack()})
            return real(x, *args, **kwargs)

        def sealed(x, look=look, real=checkpoints.checksum):
            look()
            return real(x)

        settings = {"ema": 0.9, "patience": 9, "nan": "rollback", "checkpoint_every": 2}
        settings |= {"checkpoint_dir": folder / f"run{number}", "resume": True, "on_log": look}
        gc.collect()
        with mock.patch.object(kind, "__array__", array):
            read = jaxonnx.load(path, mesh="all")
            look()
            with mock.patch.object(checkpoints, "checksum", sealed):
                for epochs in (1, 2):
                    train(read, data, mesh="all", sharding="fsdp", epochs=epochs, **settings)
        assert len(shares) > 8 * 20  # weights, momentum, averages, copies
        assert {*shares} == {1 / 8}, {*shares}
        # the model that the run begins with, beside its checkpoints; how much each tensor changed
        assert all(names & {"_file_values", "changes"} for names in gathered), gathered
        assert gathered


def quick(folder):
    """A loop of one's own, and all that compiles nothing."""
    model = demo.mlp(128)
    wrong(model)
    stored()
    data = batches(model)
    settings = {"optimizer": optax.adam(1e-2), "epochs": 2}
    alone = train(model, data, **settings)
    model.save(folder / "first.onnx")
    read = jaxonnx.load(folder / "first.onnx", mesh=mesh())
    spread(read, "fsdp", mesh())
    result = train(folder / "first.onnx", data, mesh=mesh(), sharding="fsdp", **settings)
    close(result, alone)
    np.testing.assert_allclose(result.model(data[0]), alone.model(data[0]), rtol=1e-3, atol=1e-4)
    assert "4 of 4 trained tensors changed" in str(result)
    idle = train(read, data, mesh=mesh(), sharding="data", **settings)
    assert "the axis 'model' of the mesh splits nothing" in str(idle.history.notes)
    close(idle, alone)
    spread(result.model, "fsdp", mesh())
    result.model.save(folder / "net.onnx")
    again = jaxonnx.load(folder / "net.onnx")
    np.testing.assert_array_equal(again.params["body_weight"], result.model.params["body_weight"])

    # a loop of one's own, under the mesh or not, with batches that lie on it or do not
    one = jaxonnx.training.step(model, LABELS, optax.adam(1e-2), mesh=mesh(), sharding="fsdp")
    table = model.shardings(mesh(), "fsdp", optimizer=optax.adam(1e-2))
    state, batch = one.init(), tuple(x[:16] for x in data)
    counts = 16  # of steps, and of the optimizer
    assert 0 <= size(state) - table.size <= counts
    assert table.size < table.whole / 7
    update = jax.jit(one.update, donate_argnums=0)
    memory: Any = update.lower(state, batch, one.frozen).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= table.size  # no copy of what is split, nor of a part
    state, (first, _) = update(state, batch, one.frozen)
    first = float(first)
    assert all(
        x.sharding.is_equivalent_to(y.sharding, x.ndim)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(one.init()), strict=True)
    )
    with jax.set_mesh(mesh()):
        laid = jax.device_put(batch, P("data"))
        state, (second, _) = update(state, laid, one.frozen)
        assert float(second) < first
    expected = alone.history.losses
    before = jaxonnx.evaluate(model, batch, loss=LABELS)["loss"]
    np.testing.assert_allclose(first, before, rtol=1e-5)
    with jax.set_mesh(mesh()):
        under = train(model, data, mesh=mesh(), sharding=halves, **settings)
    np.testing.assert_allclose(under.history.losses, expected, rtol=1e-5)


def stored():
    """The optimizer's state lies as its parameters, in whatever order and form it has them."""
    on = jax.make_mesh((8,), ("data",))

    def state_of(model, optimizer, **settings) -> Any:
        one = jaxonnx.training.step(model, LABELS, optimizer, mesh=on, sharding="fsdp", **settings)
        return one.init()

    state = state_of(demo.mlp(256), optax.adafactor(1e-3, min_dim_size_to_factor=32))
    (factored,) = (s for s in jax.tree.leaves(state.optimizer, is_leaf=_factored) if _factored(s))
    specs = {"v_row": (64, P()), "v_col": (256, P("data"))}
    for field, (length, spec) in specs.items():
        x = getattr(factored, field)["body_weight"]
        assert x.shape == (length,)
        assert x.sharding.is_equivalent_to(jax.NamedSharding(on, spec), 1), (field, x.sharding)

    # kernels first: (3, 3, 16, 32) of (32, 16, 3, 3), whose largest axis is that of the outputs
    sparse = {"sparsity": {"dense": 0, "dynamic": 1}, "epochs": 2}
    state = state_of(demo.model(), optax.adam(1e-3), ema=0.9, **sparse)
    kernels = {name: x for name, x in state.params.items() if x.ndim == 4 and x.nbytes >= 4096}
    assert kernels
    for name, x in kernels.items():
        moment = state.optimizer.inner[0].mu[name]
        for one in (x, moment, state.average[name], state.optimizer.pruned[name]):
            assert one.sharding.shard_shape(x.shape) == (*x.shape[:3], x.shape[3] // 8), name
        bits = state.optimizer.masks[name]
        assert bits.sharding.shard_shape(bits.shape) == (x.size // 64,)


def _factored(state):
    return type(state).__name__ == "FactoredState"


def refused(message, function, *args, **settings):
    with pytest.raises(jaxonnx.Error, match=message):
        function(*args, **settings)


def wrong(model):
    table = partial(refused, function=model.shardings, mesh=mesh())
    for message, sharding in {
        "rule 'bodies' matches no tensor.*near it are": {"bodies": P()},
        "'body_weight' .64, 128. by .*: the mesh has no axis 'modle', but 'data' .4., ": {
            "body.*": P("modle")
        },
        "length 10 does not divide into 4 parts; axis 0 .128. or axis 1 over 'model' .2.": {
            "head_weight": P(None, "data")
        },
        "and it has 1 axes": {"head_bias": P(None, "model")},
        "one axis of a tensor, not two": {"body_weight": P("model", "model")},
        "must be a jax.P": {"body_weight": 3},
        "did you mean 'fsdp'": {"body_weight": "fdsp"},
    }.items():
        table(message, sharding=sharding)
    alone = jax.make_mesh((8,), ("x",))
    refused(
        "splits over the axis 'model' of the mesh, which has 'x' .8.",
        model.shardings,
        alone,
        "tensor",
    )
    refused("2 devices do not divide .*head", demo.mlp(31).shardings, mesh(), "tensor")
    refused("mesh must be a jax.sharding.Mesh", model.shardings, "every")
    run = partial(train, model, batches(model))
    refused(
        "does not divide over the 4 devices .*; 12 or 16 would", run, batch_size=14, mesh=mesh()
    )
    refused("there is none: pass mesh='all'", run, sharding="fsdp")
    refused("'bodies' matches no tensor", run, mesh=mesh(), sharding={"bodies": P()})

    # the first rule counts, names of nodes and automatic rules are rules too
    rules = {"head_weight": P("data"), ".*": "tensor"}
    specs = model.shardings(mesh(), rules).specs
    assert specs["head_weight"] == P("data")
    assert specs["body_weight"] == P(None, "model")
    rules = {"body_weight": P("model"), "body": None, ".*": "fsdp"}
    specs = model.shardings(mesh(), rules).specs
    assert specs["body_weight"] == P("model")
    assert specs["body_bias"] == P()
    assert specs["head_weight"] == P(("data", "model"))
    assert model.shardings(mesh(), "tensor").specs == {
        "body_weight": P(None, "model"),
        "body_bias": P("model"),
        "head_weight": P("model"),
        "head_bias": P(),
    }
    text = str(model.shardings("all", "fsdp"))
    assert "body_weight" in text
    assert "-, data" in text
    assert "each of 8 devices has" in text


CASES = (
    (apart, resumed),  # the first looks at all arrays that there are
    (quick, sparse, average, scalar),
    (cnn, lstm, carried),
    (transformer, lora, few_bits, decoder),
)
"""The cases of each process: most of them share what it takes to start one."""

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    folder, *names = sys.argv[1:]
    cases = {case.__name__: case for process in CASES for case in process}
    for name in names:
        print(name, flush=True)  # where it fails
        (Path(folder) / name).mkdir()
        cases[name](Path(folder) / name)

"""DoRA, `LoRA(dora=True)`: W' = m (W + s B A) / n, where n are the norms of the outputs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic

import jaxonnx
from jaxonnx.lowering import _packed
from tests.support.adapter_files import changed, two_layers
from tests.support.few_bit_files import FILES, MS, K, N, floats, network, raw, runtime
from tests.support.lora_networks import FORMS, X, Y, mlp, normal, parse, train
from tests.support.paths import DATA
from tests.support.sweeps import sweep

ALPHA, RANK = 6.0, 3
LABELS = "softmax_cross_entropy_with_integer_labels"
LAST = {"MatMul", "MatMul, batch", "Gemm", "Gemm, C", "Identity", "ConvTranspose", "Gather"}
"""The forms whose outputs are along the second axis, not the first."""


def attach(model, where=None, rank=RANK, **options):
    """The model with adapters, before and after all of them changed."""
    lora = jaxonnx.LoRA(rank, alpha=ALPHA, where=where, dora=True, **options)
    start = lora.attach(model, jax.random.key(0))
    change = lambda x: x * (1 + 0.3 * normal(*x.shape)) + 0.3 * normal(*x.shape)  # noqa: E731
    return start, start.replace(params={name: change(v) for name, v in start.params.items()})


def compose(w, params, name, output):
    """Return m (W + s B A) / n as section 4 of the paper has it, n without a gradient."""
    a, b, m = (params[f"{name}.lora_{end}"] for end in ("A", "B", "magnitude"))
    moved = jnp.moveaxis(w, output, 0)
    v = (moved.reshape(len(b), -1) + ALPHA / len(a) * b @ a).reshape(moved.shape)
    n = jnp.linalg.norm(v.reshape(len(b), -1), axis=1)
    scale = m / jax.lax.stop_gradient(n)
    return jnp.moveaxis(v * scale.reshape(-1, *(1,) * (v.ndim - 1)), 0, output)


def assert_near(found, wanted, rtol=1e-4):
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * max(np.abs(wanted).max(), 1))


@pytest.mark.filterwarnings("ignore:the file to be saved was not compared:UserWarning")  # left
@pytest.mark.parametrize("form", FORMS)
def test_values_gradients_and_files_are_those_of_the_definition(form, tmp_path):
    nodes, shape, size, _ = FORMS[form]
    x = np.arange(4, dtype=np.float32) if form == "Gather" else normal(*size)
    dims = ",".join("d" + str(i) if i == 0 else str(d) for i, d in enumerate(size))
    proto = parse(f"g (float[{dims}] x) => (float[?] y) {{ {nodes} }}", w=normal(*shape))
    model = jaxonnx.load(proto)
    (name,) = model.params
    start, adapted = attach(model, name)
    output = int(form in LAST)
    assert start.params[f"{name}.lora_magnitude"].shape == (shape[output],)
    assert_near(start(x), model(x), 1e-6)

    def direct(params):
        return model.apply({name: compose(model.params[name], params, name, output)}, x)

    expected = jax.jit(direct)(adapted.params)
    assert_near(adapted(x), expected)
    found, wanted = (
        jax.jit(jax.grad(lambda params, f=f: (f(params) ** 3).sum()))(adapted.params)
        for f in (lambda params: adapted.apply(params, x), direct)
    )
    assert {*found} == {f"{name}.lora_{end}" for end in ("A", "B", "magnitude")}
    for key, value in wanted.items():
        assert_near(found[key], value)

    for adapters in ("merged", "nodes"):
        adapted.save(tmp_path / "out.onnx", adapters=adapters)
        session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
        assert_near(session.run(None, {"x": x})[0], expected)


def test_slopes_by_finite_differences():
    """That of a magnitude is the whole slope; those of A and B leave the norm's part out."""
    w = np.random.default_rng(0).normal(size=(6, 5))
    with jax.enable_x64(True):
        proto = parse("g (float[n,6] x) => (float[n,5] y) { y = MatMul(x, w) }", w=w)
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
        _, adapted = attach(jaxonnx.load(proto), "w")
        params = {n: v.astype(np.float64) for n, v in adapted.params.items()}
        x = np.random.default_rng(1).normal(size=(4, 6))
        loss = jax.jit(lambda params: (adapted.apply(params, x) ** 2).sum())
        slopes, step = jax.jit(jax.grad(loss))(params), 1e-6
        norm = np.linalg.norm(w + 2 * (params["w.lora_B"] @ params["w.lora_A"]).T, axis=0)

        def frozen(changed):
            """The loss with the norms of `params`: m is corrected for those of the others."""
            own = np.linalg.norm(w + 2 * (changed["w.lora_B"] @ changed["w.lora_A"]).T, axis=0)
            return loss({**changed, "w.lora_magnitude": changed["w.lora_magnitude"] * own / norm})

        for name, value in params.items():
            for place in [(0,) * value.ndim, tuple(n - 1 for n in value.shape)]:
                ends = [frozen(params | {name: value.at[place].add(s)}) for s in (step, -step)]
                np.testing.assert_allclose(
                    slopes[name][place], (ends[0] - ends[1]) / (2 * step), rtol=1e-5
                )


@pytest.mark.parametrize(
    "kind",
    sweep(
        FILES,
        *("4 bits", "4 bits, zeros", "4 bits, g_idx", "nf4, blocks over rows"),
        *("a scale a row", "blocks of columns"),
    ),
)
def test_weights_in_few_bits(kind, tmp_path, monkeypatch):
    """The base stays in few bits; its matrix is the one that onnxruntime computes.

    The norms of a large matrix are those of some rows after others.
    """
    proto = FILES[kind]()
    model, run = jaxonnx.load(proto), runtime(proto)
    columns = model.inputs[0].shape[1]
    bias = run(x=np.zeros((1, columns), np.float32))
    w = run(x=np.eye(columns, dtype=np.float32)) - bias
    x = normal(5, columns)
    start, adapted = attach(model, "w")
    assert_near(start.params["w.lora_magnitude"], np.linalg.norm(w, axis=0), 1e-5)
    assert_near(start(x), model(x), 1e-5)

    def outputs_and_slopes(compute):
        def loss(params):
            y = compute(params)
            return (y**2).sum(), y

        slopes, y = jax.jit(jax.grad(loss, has_aux=True))(adapted.params)
        return {"y": y, **slopes}

    direct = outputs_and_slopes(lambda params: x @ compose(w, params, "w", 1) + bias)
    for size in (_packed.SMALL, 0):
        with monkeypatch.context() as patch:
            patch.setattr(_packed, "SMALL", size)
            patch.setattr("jaxonnx.lowering.SMALL", size)
            patch.setattr(_packed, "PART", 4 * K * 12)
            found = outputs_and_slopes(lambda params: adapted.apply(params, x))
        for key, value in direct.items():
            assert_near(found[key], value)

    path = str(tmp_path / "out.onnx")
    if kind == "4 bits, bias":
        with pytest.raises(jaxonnx.InputError, match=r"cannot be written as nodes.*'merged'"):
            adapted.save(path)
    else:
        adapted.save(path)  # as nodes
        assert_near(runtime(path)(x=x), direct["y"])
        written = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
        for tensor in proto.graph.initializer:
            np.testing.assert_array_equal(written[tensor.name], numpy_helper.to_array(tensor))
    with pytest.warns(UserWarning, match="rounded anew") as caught:
        merged = adapted.merge_adapters(requantize=True)
    error = float(str(caught[0].message).partition(" of w ")[2].split()[0])
    difference = np.asarray(merged(np.eye(columns, dtype=np.float32))) - bias
    difference -= compose(w, adapted.params, "w", 1)
    norm = np.linalg.norm(compose(w, adapted.params, "w", 1))
    np.testing.assert_allclose(np.linalg.norm(difference) / norm, error, rtol=0.1)


def test_a_file_that_save_refuses_is_announced_before_training(tmp_path):
    model = jaxonnx.load(FILES["4 bits, bias"]())
    x = normal(4, model.inputs[0].shape[1])
    settings = {"loss": "squared_error", "optimizer": optax.sgd(0.1)}
    lora = jaxonnx.LoRA(2, where="w", dora=True)
    with pytest.warns(UserWarning, match=r"save\(path\) will refuse.*adapters='merged'"):
        jaxonnx.training.step(model, "squared_error", optax.sgd(0.1), lora=lora)
    with pytest.warns(UserWarning, match=r"save\(path\) will refuse") as caught:
        run = jaxonnx.train(model, (x, np.asarray(model(x))), batch_size=4, lora=lora, **settings)
    assert len(caught) == 1
    with pytest.raises(jaxonnx.InputError) as refused:
        run.model.save(tmp_path / "out.onnx")
    assert str(refused.value) in str(caught[0].message)
    run.lora.save(tmp_path / "out.npz")


def test_integer_products_are_refused(tmp_path):
    onnx.save(floats(w=normal(K, N)), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    model = jaxonnx.load(tmp_path / "int8.onnx")
    with pytest.raises(jaxonnx.InputError, match=r"'w_quantized'.*leave it out of where=.*dora="):
        attach(model)


def test_a_bias_is_not_scaled(tmp_path):
    """Of a Gemm behind DequantizeLinear, beside which the nodes scale the weight."""
    proto = FILES["blocks of columns"]()
    gemm = next(node for node in proto.graph.node if node.op_type == "Gemm")
    gemm.input.append("c")
    gemm.attribute.append(onnx.helper.make_attribute("beta", 0.5))
    proto.graph.initializer.append(numpy_helper.from_array(normal(N), "c"))
    _, adapted = attach(jaxonnx.load(proto), "w")
    path, x = str(tmp_path / "out.onnx"), normal(5, K)
    adapted.save(path)
    assert_near(runtime(path)(x=x), adapted(x))


@pytest.mark.parametrize("file", ["llama", "phi3"])  # float32, MatMulNBits
def test_queries_keys_and_values_apart_in_peft(file, tmp_path):
    import safetensors.numpy as numpy

    model = jaxonnx.load(DATA / "llm" / "builder" / f"{file}.onnx")
    _, adapted = attach(model, "*qkv_proj*")
    adapters = jaxonnx.Adapters.of(adapted)
    values = dict(adapters.values)
    for name in [name for name in values if name.endswith("lora_B")]:
        values[name] = values[name].at[:32].set(0)  # queries
    adapters = jaxonnx.Adapters(RANK, ALPHA, adapters.layouts, values)
    with pytest.warns(UserWarning, match="names of modules are not known for this model type"):
        adapters.save(f"{tmp_path}/peft/", model)
    again = jaxonnx.Adapters.load(tmp_path / "peft", model)
    assert again.rank == 1 + 2 * RANK
    for name in adapters.layouts:
        magnitude = f"{name}.lora_magnitude"
        np.testing.assert_array_equal(again.values[magnitude], adapters.values[magnitude])
        found, wanted = (
            x.alpha / x.rank * x.values[f"{name}.lora_B"] @ x.values[f"{name}.lora_A"]
            for x in (again, adapters)
        )
        assert_near(found, wanted)
    path = tmp_path / "peft" / "adapter_model.safetensors"
    arrays = numpy.load_file(path)
    numpy.save_file({n: x for n, x in arrays.items() if ".k_proj." not in n}, path)
    part = jaxonnx.Adapters.load(tmp_path / "peft", model)  # keys stay as they are
    for name in adapters.layouts:
        found, wanted = (
            x.alpha / x.rank * x.values[f"{name}.lora_B"] @ x.values[f"{name}.lora_A"]
            for x in (part, adapters)
        )
        keys = slice(32, 32 + (len(wanted) - 32) // 2)
        np.testing.assert_array_equal(found[keys], 0)
        assert_near(np.delete(found, keys, 0), np.delete(wanted, keys, 0))


def test_outputs_of_zeros_stay():
    w = normal(6, 5)
    w[:, 2] = 0
    model = jaxonnx.load(parse("g (float[n,6] x) => (float[n,5] y) { y = MatMul(x, w) }", w=w))
    start, _ = attach(model, "w")
    x = normal(4, 6)
    slopes = jax.grad(lambda params: (start.apply(params, x) ** 2).sum())(start.params)
    assert all(np.isfinite(v).all() for v in slopes.values())
    np.testing.assert_array_equal(np.asarray(start(x))[:, 2], 0)


@pytest.mark.parametrize("base", ["floats", "4 bits"])
def test_files_of_adapters(base, tmp_path):
    model = jaxonnx.load(two_layers() if base == "4 bits" else mlp().to_onnx())
    _, adapted = attach(model, "*_proj*" if base == "4 bits" else "w.")
    x = normal(4, model.inputs[0].shape[1])
    adapted.save(tmp_path / "nodes.onnx", adapters="nodes")
    assert_near(runtime(str(tmp_path / "nodes.onnx"))(x=x), adapted(x))
    adapters, folder = jaxonnx.Adapters.of(adapted), f"{tmp_path}/peft/"
    adapters.save(tmp_path / "a.npz")
    adapters.save(folder, names=lambda name: name.partition(".MatMul")[0])
    for again in (
        jaxonnx.Adapters.load(tmp_path / "a.npz"),
        jaxonnx.Adapters.load(folder, model),
    ):
        assert again.values.keys() == adapters.values.keys()
        assert_near(again.attach(model)(x), adapted(x), 1e-5)
    with pytest.raises(jaxonnx.InputError, match=r"no magnitudes.*\.npz or a folder of PEFT"):
        adapters.save(tmp_path / "a.onnx_adapter")
    with pytest.raises(jaxonnx.InputError, match=r"'inputs' has no place.*'nodes' or 'merged'"):
        adapted.save(tmp_path / "a.onnx", adapters="inputs")
    path = tmp_path / "peft" / "adapter_config.json"
    config = json.loads(path.read_text())
    assert config["use_dora"] is True
    path.write_text(json.dumps(config | {"use_dora": False}))
    with pytest.raises(jaxonnx.InputError, match=r"use_dora is False.* a lora_magnitude_vector"):
        jaxonnx.Adapters.load(folder, model)
    values = dict(adapters.values)
    name = next(n for n in values if n.endswith("magnitude"))
    values[name] = values[name][1:]
    other = jaxonnx.Adapters(adapters.rank, adapters.alpha, adapters.layouts, values)
    with pytest.raises(jaxonnx.InputError, match="of another model"):
        other.attach(model)


def test_a_run_resumes_bit_for_bit(tmp_path):
    settings = {"lora": jaxonnx.LoRA(2, dora=True), "trainable": "b2"}
    whole = train(mlp(), **settings)
    train(mlp(), **settings, epochs=1, checkpoint_dir=tmp_path)
    resumed = train(mlp(), **settings, checkpoint_dir=tmp_path, resume=True)
    assert resumed.history.losses == whole.history.losses
    for name, value in whole.lora.values.items():
        np.testing.assert_array_equal(resumed.lora.values[name], value)
    start = jaxonnx.LoRA(2, dora=True).attach(mlp(), jax.random.key(0)).params
    for name in ("w1.lora_magnitude", "w2.lora_magnitude"):
        assert np.abs(whole.lora.values[name] - start[name]).min() > 0
    further = train(mlp(), lora=whole.lora, epochs=1)
    assert further.history.losses[0] < whole.history.losses[0]
    again = jaxonnx.Adapters.load(tmp_path)
    assert again.values.keys() == whole.lora.values.keys()
    assert "adapters of 2 weights" in str(whole)


def test_groups_of_an_optimizer_choose_magnitudes():
    """As PEFT's LoRA+ has them: B and all vectors at the higher rate."""
    groups = jaxonnx.labels({"b": ".*lora_(B|magnitude)"}, default="a")
    rates = optax.multi_transform({"a": optax.adam(1e-3), "b": optax.adam(16e-3)}, groups)
    _, adapted = attach(mlp(), "w.")
    step = jaxonnx.training.step(adapted, LABELS, rates)
    state, _ = jax.jit(step.update)(step.init(), ((X[:16],), Y[:16]), step.frozen)
    for name, value in step.view(state).items():
        moved = np.abs(value - adapted.params[name])
        np.testing.assert_allclose(moved, 1e-3 if name[-1] == "A" else 16e-3, rtol=0.05)


@pytest.mark.parametrize(
    "base",
    sweep(["floats", "4 bits", "4 bits, adapted before"], "floats", "4 bits, adapted before"),
)
def test_an_exported_step_trains_the_same(base, tmp_path):
    from tests.support.exported_steps import trained

    model = mlp() if base == "floats" else jaxonnx.load(two_layers())
    if base == "4 bits, adapted before":  # whose factors have the names of the new ones
        changed(model, 3, lambda name, value: True).save(tmp_path / "net.onnx", adapters="nodes")
        model = jaxonnx.load(tmp_path / "net.onnx")
    x = normal(16, model.inputs[0].shape[1])
    y = normal(*model(x).shape)
    settings = {"optimizer": optax.adam(1e-2), "lora": jaxonnx.LoRA(2, alpha=4.0, dora=True)}
    jaxonnx.export_step(model, tmp_path, (x, y), "squared_error", **settings)
    losses, values, *_ = trained(tmp_path, (x, y, np.ones(16, np.float32)), 5)
    here = jaxonnx.training.step(model, "squared_error", **settings)
    update, state = jax.jit(here.update), here.init()
    for loss in losses:
        state, (wanted, _) = update(state, (x, y))
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    back = jaxonnx.import_step(model, tmp_path, values)
    assert_near(back(x), here.to_model(here.view(state), state.state)(x), 1e-4)


def test_no_whole_matrix_is_kept_in_floating_point():
    """Nor are two parts of matrices in floating point: temporaries beside those of LoRA."""
    layers, size, block = 8, 1024, 32
    nodes, tensors, value = [], {}, "x"
    for i in range(layers):
        sizes = {"K": size, "N": size, "bits": 4, "block_size": block}
        inputs, output = [value, f"w{i}", f"s{i}"], "y" if i == layers - 1 else f"h{i}"
        nodes.append(onnx.helper.make_node("MatMulNBits", inputs, [output], domain=MS, **sizes))
        tensors[f"w{i}"] = raw(size, size // block, block // 2)
        tensors[f"s{i}"] = np.full((size, size // block), 0.01, np.float32)
        value = output
    model = jaxonnx.load(network(nodes, ("x", onnx.TensorProto.FLOAT, ["n", size]), **tensors))
    taken = []
    for dora in (False, True):
        adapted = jaxonnx.LoRA(2, dora=dora).attach(model, jax.random.key(0))
        loss = lambda params, state, x, m=adapted: m.apply(params, x, state=state).sum()  # noqa: E731
        step = jax.jit(jax.value_and_grad(loss))
        compiled = step.lower(adapted.params, adapted.state, np.ones((4, size), np.float32))
        taken.append(compiled.compile().memory_analysis().temp_size_in_bytes)
    assert taken[1] - taken[0] < 4 * size**2

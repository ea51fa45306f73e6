"""Files of onnxruntime-genai's builder, from prompt to steps with caches, and in training.

Some of them are stored (`tests.support.genai_builder` writes them); all are built where torch,
transformers and onnxruntime-genai are installed (the extra test-llm).
"""

import importlib.util
import json
import warnings

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import optax
import pytest

import jaxonnx
from tests.support import genai_builder
from tests.support.genai_builder import ARCHITECTURES, FOLDER, STORED, VOCABULARY, WINDOW

TOLD = json.loads((FOLDER / "losses.json").read_text())
IDS = np.array(TOLD["ids"])
QUICK = ("gemma3_text", "gpt_oss")
FILES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in STORED]
INSTALLED = all(map(importlib.util.find_spec, ("torch", "transformers", "onnxruntime_genai")))
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
DTYPES |= {"tensor(int64)": np.int64, "tensor(uint8)": np.uint8}
DTYPES |= {"tensor(bfloat16)": ml_dtypes.bfloat16}


class Decoder:
    """A file in onnxruntime and as a Model, and the caches that onnxruntime gave last."""

    def __init__(self, path):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        nodes = onnx.load(path, load_external_data=False).graph.node
        if any(node.op_type == "DequantizeLinear" for node in nodes):
            # fused to MatMulNBits, such a product would round its activations to int8
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(path, options)
        self.model = jaxonnx.load(path)
        self.outputs = [value.name for value in self.session.get_outputs()]
        sliding = {
            value: WINDOW
            for node in nodes
            if any(a.name == "sliding_window_cache" and a.i for a in node.attribute)
            for value in node.input[3:5]
        }
        self.slides = bool(sliding)
        # in half precision on a CPU the mask is that of whole prompts, or of one step
        self.takes_chunks = any(node.op_type == "GroupQueryAttention" for node in nodes)
        self.caches = {}
        for value in self.session.get_inputs():
            if value.name.startswith("past"):
                length = sliding.get(value.name, 0)
                # batch, heads, length, size; or batch, channels, length of a convolution
                sizes = dict(zip(range(4), (1, 1, length, 16), strict=True))
                shape = [n if isinstance(n, int) else sizes[i] for i, n in enumerate(value.shape)]
                self.caches[value.name] = np.zeros(shape, DTYPES[value.type])
        self.length = 0

    def feed(self, ids, lengths):
        """The inputs for further tokens; each row has so many of them."""
        total = self.length + ids.shape[1]
        mask = np.arange(total) < self.length + np.array(lengths)[:, None]
        places = np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
        given |= {n: np.repeat(x, len(ids), 0) for n, x in self.caches.items()}
        return {
            value.name: given[value.name].astype(DTYPES[value.type])
            for value in self.session.get_inputs()
        }

    def check(self, ids, lengths=None, keep=True):
        """Compare logits of real tokens, and caches where all rows have as many."""
        lengths = lengths or [ids.shape[1]] * len(ids)
        feed = self.feed(ids, lengths)
        wanted = dict(zip(self.outputs, self.session.run(None, feed), strict=True))
        found = dict(zip(self.outputs, self.model(**feed), strict=True))
        steps = wanted["logits"].shape[1]
        for row, length in enumerate(lengths):
            at = (row, slice(min(length, steps)))
            self.compare(found["logits"][at], wanted["logits"][at])
        if not keep:
            return
        self.length += ids.shape[1]
        for name in self.caches:
            output = name.replace("past_key_values", "present").replace("past", "present")
            x, e = found[output], wanted[output]
            assert (x.shape, x.dtype) == (e.shape, e.dtype)
            rows = min(self.length, x.shape[2])
            self.compare(x[:, :, :rows], e[:, :, :rows])
            self.caches[name] = e

    def compare(self, x, e):
        half = self.caches and any(c.dtype.itemsize == 2 for c in self.caches.values())
        x, e = np.asarray(x, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(x, e, rtol=0, atol=(1e-2 if half else 1e-5) * np.abs(e).max())


def check_decoding(path):
    decoder = Decoder(path)
    if not decoder.slides:  # onnxruntime takes no prompts of several lengths for these
        decoder.check(IDS, [12, 7], keep=False)
    decoder.check(IDS[:1, :10])  # beyond the window
    if decoder.takes_chunks:
        decoder.check(IDS[1:, :3])
    decoder.check(IDS[1:, 3:4])


def check_training(path, loss, atol, tuned, lora=None):
    """The first loss is that of transformers, it falls, and the tuned file is as the first one."""
    model = jaxonnx.load(path)
    data = {"input_ids": IDS}
    told = jaxonnx.evaluate(model, data, loss="causal_lm", metrics=[])
    assert told["loss"] == pytest.approx(loss, abs=atol)
    adam = optax.adam(3e-3)
    result = jaxonnx.train(model, data, loss="causal_lm", optimizer=adam, epochs=8, lora=lora)
    losses = result.history.losses
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.2
    names = [[value.name for value in m.inputs + m.outputs] for m in (model, result.model)]
    assert names[0] == names[1]
    result.model.save(tuned)
    Decoder(tuned).check(IDS[:1, :10])


@pytest.mark.parametrize("name", FILES)
def test_a_stored_file_decodes_as_onnxruntime_does(name):
    check_decoding(FOLDER / f"{name}.onnx")


@pytest.mark.parametrize("name", FILES)
def test_a_stored_file_trains(name, tmp_path):
    """Losses of float32 files are those of transformers; 4 bits and float16 are near."""
    precision = STORED[name][0]
    atol = {"fp32": 1e-4, "fp16": 2e-2, "int4": 0.5}[precision]
    check_training(FOLDER / f"{name}.onnx", TOLD["losses"][name], atol, tmp_path / "tuned.onnx")


def test_all_logits_are_trained_where_the_file_has_those_of_the_last_token():
    """As `prune_lm_head` writes it; the file stays as it is."""
    model = jaxonnx.load(FOLDER / "qwen2.onnx")
    (logits,) = [value for value in model.outputs if value.name == "logits"]
    assert logits.shape == ("batch_size", 1, VOCABULARY)
    told = jaxonnx.evaluate(model, {"input_ids": IDS}, loss="causal_lm", metrics=[])
    assert told["loss"] == pytest.approx(TOLD["losses"]["qwen2"], abs=2e-2)
    whole = model.without_cache().predict({"input_ids": IDS, "attention_mask": np.ones_like(IDS)})
    assert whole.shape == (2, 1, VOCABULARY)


def test_paged_attention_is_refused_with_the_way_out():
    node = onnx.helper.make_node("PagedAttention", ["x"], ["y"], domain="com.microsoft")
    values = [onnx.helper.make_tensor_value_info(n, 1, [2, 2]) for n in "xy"]
    graph = onnx.helper.make_graph([node], "served", values[:1], values[1:])
    opsets = [onnx.helper.make_opsetid("com.microsoft", 1), onnx.helper.make_opsetid("", 21)]
    with pytest.raises(jaxonnx.Error, match="without use_paged_attention"):
        jaxonnx.load(onnx.helper.make_model(graph, opset_imports=opsets))


VARIANTS = {
    "float32": ("fp32", "cpu", []),
    "float16": ("fp16", "webgpu", []),
    "int4": ("int4", "cpu", genai_builder.QUANTIZED),
    "capture": ("fp32", "webgpu", ["use_webgpu_fp32=true", "enable_webgpu_graph=true"]),
    "int8_cache": ("fp32", "cpu", ["kv_cache_quant_scheme=int8_per_tensor"]),
}


@pytest.mark.deep
@pytest.mark.skipif(not INSTALLED, reason="needs the extra test-llm")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_builder_writes(architecture, variant, tmp_path):
    precision, provider, options = VARIANTS[variant]
    network = genai_builder.write_checkpoint(architecture, tmp_path / "checkpoint")
    path = genai_builder.build(
        tmp_path / "checkpoint", tmp_path / "file", precision, provider, options
    )
    types = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    inputs = [node.input for node in onnx.load(path).graph.node if node.op_type[:5] == "Group"]
    if any(len(names) > 14 and names[14] for names in inputs):
        pytest.skip("onnxruntime's CPU provider has no norms in GroupQueryAttention")
    assert types & {"GroupQueryAttention", "MultiHeadAttention"}
    check_decoding(path)
    atol = {"fp32": 1e-4, "fp16": 2e-2, "int4": 0.5}[precision]
    atol = 5e-2 if variant == "int8_cache" else atol
    # of integers only norms would be trained, and with tied embeddings nothing else
    lora = jaxonnx.LoRA(rank=4, where="all-linear") if precision == "int4" else None
    loss = genai_builder.loss_of(network, IDS.tolist())
    check_training(path, loss, atol, tmp_path / "tuned.onnx", lora)


FEW = genai_builder.QUANTIZED
OPTIONS = {
    "include_hidden_states": ("llama", "fp32", ["include_hidden_states=true"]),
    "aux_hidden_state_layers": ("llama", "fp32", ["aux_hidden_state_layers=1"]),
    "fuse_mlp_gate_up": ("llama", "fp32", ["fuse_mlp_gate_up=true"]),
    "fuse_qkv": ("llama", "fp32", ["fuse_qkv=false"]),
    "shared_embeddings": ("qwen3", "int4", [*FEW, "shared_embeddings=true"]),
    "use_qdq": ("llama", "int4", [*FEW, "use_qdq=true"]),
    "is_symmetric": ("llama", "int4", [*FEW, "is_symmetric=false"]),
    "op_types_to_quantize": ("llama", "int4", [*FEW, "op_types_to_quantize=MatMul/Gather"]),
    "nodes_to_exclude": ("llama", "int4", [*FEW, "nodes_to_exclude=/lm_head/MatMul"]),
}
"""Options of the builder that change the graph, on a CPU: architecture, precision and options.

The others change settings of runtimes, graphs for CUDA alone, or are other choices of bits; of so
small matrices the builder cannot write `k_quant_mixed`.
"""
built = pytest.mark.skipif(not INSTALLED, reason="needs the extra test-llm")


@pytest.fixture
def build(tmp_path):
    """A function that writes a checkpoint and its file, and returns the network and the path."""

    def write(architecture, precision, options):
        network = genai_builder.write_checkpoint(architecture, tmp_path / "checkpoint")
        target = tmp_path / "file"
        return network, genai_builder.build(
            tmp_path / "checkpoint", target, precision, "cpu", options
        )

    return write


@pytest.mark.deep
@built
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_builder(option, build, tmp_path):
    architecture, precision, options = OPTIONS[option]
    network, path = build(architecture, precision, options)
    check_decoding(path)
    few = precision == "int4"
    lora = jaxonnx.LoRA(rank=4, where="all-linear") if few else None
    loss = genai_builder.loss_of(network, IDS.tolist())
    check_training(path, loss, 0.5 if few else 1e-4, tmp_path / "tuned.onnx", lora)


@pytest.mark.deep
@built
@pytest.mark.filterwarnings("ignore")
def test_files_without_embeddings_train_on_features(build, tmp_path):
    """`exclude_embeds`: loss and gradient of the layer of logits are those of transformers."""
    import torch

    network, path = build("llama", "fp32", ["exclude_embeds=true"])
    features = network.get_input_embeddings()(torch.tensor(IDS))
    loss = network(inputs_embeds=features, labels=torch.tensor(IDS)).loss
    loss.backward()
    model, features = jaxonnx.load(path), features.detach().numpy()
    with pytest.raises(jaxonnx.Error, match="inputs_embeds"):
        jaxonnx.train(model, {"input_ids": IDS}, loss="causal_lm", optimizer=optax.sgd(1.0))
    with pytest.raises(jaxonnx.Error, match="no targets, and no input of tokens"):
        jaxonnx.train(model, {"inputs_embeds": features}, loss="causal_lm", optimizer=optax.sgd(1))
    data = {"inputs_embeds": features, "labels": IDS}
    result = jaxonnx.train(
        model, data, loss="causal_lm", optimizer=optax.sgd(1.0), epochs=1, batch_size=2
    )
    assert result.history.losses[0] == pytest.approx(loss.item(), abs=1e-5)
    name = "lm_head.MatMul.weight"
    change = model.params[name] - result.model.params[name]
    np.testing.assert_allclose(change, network.lm_head.weight.grad.numpy().T, rtol=1e-3, atol=1e-6)
    result.model.save(tmp_path / "tuned.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "tuned.onnx")
    feed = {"inputs_embeds": features, "attention_mask": np.ones_like(IDS)}
    pasts = [v.name for v in session.get_inputs() if v.name not in feed]
    empty = {name: np.zeros((2, 1, 0, 16), np.float32) for name in pasts}
    (wanted,) = session.run(["logits"], feed | empty)
    np.testing.assert_allclose(result.model.without_cache()(**feed), wanted, atol=1e-5)


@pytest.mark.deep
@built
@pytest.mark.filterwarnings("ignore")
def test_files_without_logits_have_features_to_go_on_from(build):
    """`exclude_lm_head`: they train, and the loss of tokens says what is missing."""
    _, path = build("llama", "fp32", ["exclude_lm_head=true"])
    model, ids = jaxonnx.load(path), IDS
    session = onnxruntime.InferenceSession(path)
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    pasts = [v.name for v in session.get_inputs() if v.name not in feed]
    empty = {name: np.zeros((2, 1, 0, 16), np.float32) for name in pasts}
    (wanted,) = session.run(["hidden_states"], feed | empty)
    whole = model.without_cache()
    np.testing.assert_allclose(whole(**feed), wanted, atol=1e-5)
    with pytest.raises(jaxonnx.TrainingError, match=r"'hidden_states' has features.*model.then"):
        jaxonnx.train(model, {"input_ids": ids}, loss="causal_lm", optimizer=optax.sgd(1.0))
    data = {"input_ids": ids, "y": np.zeros_like(wanted)}
    adam = {"optimizer": optax.adam(1e-2), "epochs": 5, "batch_size": 2}
    found = jaxonnx.train(model, data, loss="squared_error", **adam).history.losses
    assert found[-1] < 0.9 * found[0]


@pytest.mark.deep
@built
@pytest.mark.filterwarnings("ignore")
def test_smollm3_in_half_precision_for_cpu_has_no_positions(build):
    """The builder leaves its rotary embeddings out there: the file is a network without them."""
    import torch
    import transformers

    network, path = build("smollm3", "fp16", [])
    types = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    assert "RotaryEmbedding" not in types
    assert "GroupQueryAttention" not in types
    told = jaxonnx.evaluate(path, {"input_ids": IDS}, loss="causal_lm", metrics=[])["loss"]
    checkpoint = path.parent.with_name("checkpoint")
    without = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, no_rope_layers=[0, 0]
    )
    assert told == pytest.approx(genai_builder.loss_of(without, IDS.tolist()), abs=4e-3)
    assert abs(told - genai_builder.loss_of(network, IDS.tolist())) > 1e-2


@built
@pytest.mark.deep
@pytest.mark.parametrize("provider", ["cpu", "webgpu"])  # with room that grows, and fixed caches
def test_rooms_filled_to_their_end_continue_as_transformers_does(provider, tmp_path):
    """Rooms of 16, 32 and 64 tokens, the last one the context: one token less, and one more."""
    import torch

    network = genai_builder.write_checkpoint("llama", tmp_path / "hf")
    genai_builder.change_norms(network)
    options = [] if provider == "cpu" else STORED["llama"][2]
    genai_builder.build(tmp_path / "hf", tmp_path / "onnx", "fp32", provider, options)
    model, random = jaxonnx.load(tmp_path / "onnx"), np.random.default_rng(0)
    context = network.config.max_position_embeddings
    for total in (15, 16, 17, 31, 32, 33, 63, 64, 65):
        for width in {1, 5, 16, total - 2, total - 1} - {total}:
            if not 0 < width < min(total, context):
                continue
            row = random.integers(3, VOCABULARY, width)
            new = min(total, context) - width
            known = {"input_ids": torch.tensor(row[None])}
            known["attention_mask"] = torch.ones_like(known["input_ids"])
            settings = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
            expected = network.generate(**known, **settings, eos_token_id=None)[0].numpy()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                found = model.generate(row, max_new_tokens=total - width, stop=[])
            np.testing.assert_array_equal(found, expected)
            ended = [w for w in caught if "a continuation ends" in str(w.message)]
            assert len(ended) == (total > context), (total, width)

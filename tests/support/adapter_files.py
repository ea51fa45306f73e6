"""Models with adapters, and adapters in the files of PEFT and onnxruntime-genai."""

import json

import jax
import jax.numpy as jnp
import onnx
import onnxruntime
from safetensors.numpy import save_file

import jaxonnx
from tests.support.few_bit_files import MS, network, normal, raw


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def changed(model, rank=3, where="w", dora=False):
    """The model with adapters whose B is no longer zero."""
    lora = jaxonnx.LoRA(rank, alpha=2.0 * rank, where=where, dora=dora)
    adapted = lora.attach(model, jax.random.key(0))
    return adapted.replace(
        params={
            n: jnp.asarray(0.3 * normal(*v.shape)) if "lora" in n else v
            for n, v in adapted.params.items()
        }
    )


def base_tensors(proto):
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    return {name: (x.dtype, x.tobytes()) for name, x in arrays.items()}


def two_layers(size=32):
    """A file as onnxruntime-genai's builder names its weights, in 4 bits."""
    nodes, tensors = [], {}
    for name, x, y in (("q_proj", "x", "h"), ("o_proj", "r", "y")):
        weight = f"model.layers.0.attn.{name}.MatMul.weight_"
        sizes = {"K": size, "N": size, "bits": 4, "block_size": 16, "accuracy_level": 1}
        inputs = [x, f"{weight}Q4", f"{weight}scales"]
        node = f"/model/layers.0/attn/{name}/MatMul_Q4"
        nodes.append(onnx.helper.make_node("MatMulNBits", inputs, [y], node, domain=MS, **sizes))
        tensors[f"{weight}Q4"] = raw(size, size // 16, 8)
        tensors[f"{weight}scales"] = 0.05 * normal(size, size // 16)
    nodes.insert(1, onnx.helper.make_node("Relu", ["h"], ["r"]))
    return network(nodes, ("x", onnx.TensorProto.FLOAT, ["n", size]), **tensors)


def peft_folder(folder, factors, **config):
    """A folder as PEFT writes it."""
    folder.mkdir()
    arrays = {
        f"base_model.model.{name}.lora_{end}.weight": x
        for name, pair in factors.items()
        for end, x in pair.items()
    }
    save_file(arrays, folder / "adapter_model.safetensors")
    whole = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return arrays

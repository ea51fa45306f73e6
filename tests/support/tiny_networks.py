"""Small networks and data for them, for tests of the loop rather than of what it trains."""

import math

import numpy as np
import onnx.parser
import optax
from onnx import ModelProto, TensorProto, helper, numpy_helper

import jaxonnx

LABELS = "softmax_cross_entropy_with_integer_labels"


def mlp(dropout: bool = False, hidden: int = 16) -> ModelProto:
    """8 -> 16 -> 4."""
    random = np.random.default_rng(0)
    shapes = {"w1": (8, hidden), "b1": (hidden,), "w2": (hidden, 4), "b2": (4,)}
    weights = [
        numpy_helper.from_array(random.normal(0, 0.3, shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Dropout" if dropout else "Identity", ["a"], ["d"]),
        helper.make_node("Gemm", ["d", "w2", "b2"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", 8), ("y", 4))
    ]
    graph = helper.make_graph(nodes, "mlp", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def examples(count: int = 40, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and the greatest of their first four numbers as labels."""
    x = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return x, x[:, :4].argmax(1)


def train(model=None, data=None, **settings) -> jaxonnx.Result:
    """Five steps an epoch."""
    settings = {
        "loss": LABELS,
        "optimizer": optax.adam(1e-2),
        "batch_size": None if callable(data) or isinstance(data, list) else 8,
    } | settings
    return jaxonnx.train(
        mlp() if model is None else model, examples() if data is None else data, **settings
    )


def weights(result: jaxonnx.Result) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in result.model.params.items()}


def same(one: jaxonnx.Result, other: jaxonnx.Result) -> bool:
    """Bit for bit."""
    a, b = weights(one), weights(other)
    return {*a} == {*b} and all(a[name].tobytes() == b[name].tobytes() for name in a)


def text(tokens: int = 7, dims: str = "n, t", outputs: str = "float[n, t, 7] logits") -> ModelProto:
    """Logits of each token, or scores of the whole text; the mean is over what the mask has."""

    def weights(name: str, seed: int, *shape: int) -> str:
        numbers = np.random.default_rng(seed).normal(size=math.prod(shape))
        return f"float{[*shape]} {name} = {{{', '.join(f'{x:.3f}' for x in numbers)}}}"

    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    text (int64[{dims}] input_ids, int64[{dims}] attention_mask) => ({outputs})
    <{weights("table", 0, tokens, 4)}, {weights("head", 1, 4, tokens)},
     int64[1] one = {{1}}, int64[1] two = {{2}}> {{
        embedded = Gather(table, input_ids)
        real = Cast <to = 1> (attention_mask)
        mask = Unsqueeze(real, two)
        masked = Mul(embedded, mask)
        sum = ReduceSum(masked, one)
        count = ReduceSum(mask, one)
        mean = Div(sum, count)
        seen = Add(embedded, mean)
        logits = MatMul(seen, head)
        flat = Squeeze(mean, one)
        scores = MatMul(flat, head)
    }}""")

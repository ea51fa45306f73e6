"""Tables of positions: learned where they are added to embeddings, and no sinusoids or masks."""

import numpy as np
import onnx
import onnx.parser
import pytest

import jaxonnx
from jaxonnx._graph.known_constants import describe_constant

POSITIONS = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
ANGLES = np.arange(6)[:, None] / 100 ** (np.arange(8) / 8)
WAVES = np.concatenate([np.sin(ANGLES), np.cos(ANGLES)], 1)


@pytest.mark.parametrize(
    ("nodes", "table", "trained"),
    [
        ("y = Add(e, w)", POSITIONS, True),
        ("y = Add(w, e)", POSITIONS[None], True),
        ("k = Constant <value = float {4.0}> () s = Mul(e, k) y = Add(s, w)", POSITIONS, True),
        ("y = Add(e, w)", WAVES, False),
        ("y = Add(e, w)", 3 * WAVES.reshape(6, 2, 8).transpose(0, 2, 1).reshape(1, 6, 16), False),
        ("y = Add(e, w)", np.r_[np.zeros((1, 16)), WAVES[1:]], False),  # of a class token
        ("y = Add(e, w)", np.where(POSITIONS > 0, 0, -1e9), False),  # a mask
        ("y = Add(e, w)", np.tri(6, 16) * -1e4 + POSITIONS, False),
        ("r = Relu(e) y = Add(r, w)", POSITIONS, True),
        ("y = Mul(e, w)", POSITIONS, True),
        ("y = Add(e, w)", np.zeros((6, 16)), False),  # before training
        ("y = Add(e, w)", np.stack([POSITIONS, POSITIONS]), False),  # not for all examples alike
    ],
)
def test_tables_of_positions(nodes, table, trained):
    model = jaxonnx.load(embedded(nodes, table))
    assert ("w" in model.params) == trained
    told = " ".join(str(model).split())
    if not trained and len(np.unique(table)) > 2 and not describe_constant(np.asarray(table)):
        assert "'w' (at" in told
        assert "trainable=[*model.params, 'w']" in told
        assert {*model.with_trainable([*model.params, "w"]).params} == {"t", "w"}
    else:
        assert "learned?" not in told


def embedded(nodes, table):
    """A file that looks tokens up in a table "t" and has another table "w"."""
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]>
    g (int64[2,6] x) => (float[2,6,16] y) {{ e = Gather(t, x) {nodes} }}
    """)
    vocabulary = np.random.default_rng(1).normal(size=(9, 16))
    for name, value in (("t", vocabulary), ("w", table)):
        tensor = onnx.numpy_helper.from_array(value.astype(np.float32), name)
        proto.graph.initializer.append(tensor)
    return proto

"""Tables of positions: learned where they are added to embeddings, and no sinusoids or masks."""

import jax
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import jaxonnx
from jaxonnx._graph.sites import describe_constant

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
        assert "'w' (at" in told or "'w': " in told
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


GRID = "g = Reshape(p, s) gt = Transpose <perm = [0, 3, 1, 2]> (g)"
SIZE = "size = Shape <start = 2, end = 4> (c)"
RESIZE = f"{SIZE} first = Shape <end = 2> (gt) sizes = Concat <axis = 0> (first, size)"
RESIZE += """ gr = Resize <mode = "cubic"> (gt, , , sizes)"""
BACK = "gf = Reshape(gr, q) gp = Transpose <perm = [0, 2, 1]> (gf)"
WHOLE = f"p = Identity(w) {GRID}"
CUT = f"p = Slice(w, one, end, one) {GRID}"
CLASS = "head = Slice(w, zero, one, one)"


@pytest.mark.parametrize(
    ("nodes", "size", "count"),
    [
        (f"{WHOLE} {RESIZE} {BACK} y = Add(t, gp)", 24, 9),
        (f"{CUT} {RESIZE} {BACK} y = Add(t, gp)", 24, 10),
        (
            f"{CLASS} {CUT} {RESIZE} {BACK} all = Concat <axis = 1> (head, gp) "
            "n = Shape <end = 1> (t) last = Constant <value_ints = [1, 16]> () "
            "m = Concat <axis = 0> (n, last) k = Expand(token, m) u = Concat <axis = 1> (k, t) "
            "y = Add(u, all)",
            24,
            10,
        ),
        (f"{WHOLE} gr = Pad(gt, pads) {BACK} y = Add(t, gp)", 20, 9),
        (f"{WHOLE} {SIZE} gr = Slice(gt, corner, size, hw) {BACK} y = Add(t, gp)", 8, 9),
        (
            f"{WHOLE} gr = AveragePool <kernel_shape = [2, 2]> (gt) {BACK} y = Add(t, gp)",
            8,
            9,
        ),
    ],
    ids=["Resize", "Slice and Resize", "Concat", "Pad", "Slice of a grid", "AveragePool"],
)
@pytest.mark.parametrize("kind", ["learned", "sinusoid", "mask"])
def test_positions_that_are_fitted_to_the_image(nodes, size, count, kind):
    """As DINOv2 and other vision transformers do; a mask or a sinusoid stays a constant."""
    proto = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 17]>
    g (float[n,3,h,k] x) => (float[n,m,16] y) <
      int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] end = {{100}}, int64[2] hw = {{2, 3}},
      int64[2] corner = {{0, 0}}, int64[4] s = {{1, 3, 3, 16}}, int64[3] q = {{0, 16, -1}},
      int64[8] pads = {{0, 0, 1, 1, 0, 0, 1, 1}}> {{
      c = Conv <strides = [4, 4]> (x, kernel)
      cf = Reshape(c, q)
      t = Transpose <perm = [0, 2, 1]> (cf)
      {nodes}
    }}""")
    random = np.random.default_rng(2)
    angles = np.arange(count)[:, None] / 100 ** (np.arange(8) / 8)
    tables = {
        "learned": random.normal(size=(count, 16)),
        "sinusoid": np.concatenate([np.sin(angles), np.cos(angles)], 1),
        "mask": np.tri(count, 16) * -1e9,
    }
    kernel, token = random.normal(size=(16, 3, 4, 4)), random.normal(size=(1, 1, 16))
    for name, value in (("kernel", kernel), ("token", token), ("w", tables[kind][None])):
        tensor = onnx.numpy_helper.from_array(value.astype(np.float32), name)
        proto.graph.initializer.append(tensor)
    model = jaxonnx.load(proto)
    assert ("w" in model.params) == (kind == "learned")
    x = random.normal(size=(2, 3, size, size)).astype(np.float32)
    before = session(model)(x)
    np.testing.assert_allclose(model(x), before, rtol=1e-4, atol=1e-4)
    if kind == "learned":  # the output is linear in the table
        weights = random.normal(size=before.shape).astype(np.float32)
        loss = lambda p: (model.apply(p, x) * weights).sum()  # noqa: E731
        gradient = jax.jit(jax.grad(loss))(model.params)["w"]
        step = random.normal(size=(1, count, 16)).astype(np.float32)
        moved = model.replace(params={**model.params, "w": model.params["w"] + step})
        slope = ((session(moved)(x) - before).astype(np.float64) * weights).sum()
        near = 1e-5 * np.linalg.norm(gradient) * np.linalg.norm(step)
        np.testing.assert_allclose(np.vdot(gradient, step), slope, rtol=0, atol=near)


def session(model):
    """A saved model as a function in onnxruntime."""
    made = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    return lambda x: made.run(None, {"x": x})[0]

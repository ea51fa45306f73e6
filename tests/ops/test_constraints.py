"""What operators declare of their arguments, and what is said of those that are not so."""

from typing import Annotated, Literal, Required, TypedDict, Unpack

import jax
import numpy as np
import onnx.parser
import pytest
from jax import export

import jaxonnx
from jaxonnx import registry
from jaxonnx._constraints import AtLeast, Default, NotNegative, Positive
from jaxonnx.errors import NodeError
from jaxonnx.registry import Static, op


@pytest.fixture
def register(monkeypatch):
    """Register an operator for this test alone, and return it."""
    monkeypatch.setattr(registry, "_OPS", registry.defaultdict(list))

    def add(function, **options):
        op("Test", since=1, **options)(function)
        return registry.lookup("", "Test", 1)

    return add


def full(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("shapes", "right", "wrong", "message"),
    [
        ("x (N, C)", [(2, 3)], [(2, 3, 4)], r"x has shape \[2, 3, 4\]; it must be \(N, C\)$"),
        ("x (N, C), y (C)", [(2, 3), (3,)], [(2, 3), (2,)], r"\(C\) with C = 3"),
        ("x (N, *D), y (*D)", [(2, 3, 4), (3, 4)], [(2, 3, 4), (3,)], r"D = \[3, 4\]"),
        ("x (*D, N), y (N)", [(3,), (3,)], [(4, 3), (4,)], "N = 3"),
        ("x (n, n)", [(2, 2)], [(2, 3)], r"\(n, n\)$"),
        ("x (N, 4)", [(2, 4)], [(2, 3)], r"\(N, 4\)"),
        ("x (N, group*c)", [(2, 4)], [(2, 5)], r"\(N, group\*c\) with group = 2"),
        ("x (c, group*c)", [(3, 6)], [(3, 5)], "with group = 2"),
        ("x (group*group*c)", [(8,)], [(6,)], "with group = 2"),
        ("x (r, r + 1)", [(2, 3)], [(2, 2)], r"\(r, r \+ 1\)"),
        ("x (*D), y (rank D)", [(2, 3), (2,)], [(2, 3), (3,)], r"\(rank D\) with D = \[2, 3\]"),
        ("x (C) | (N, C)", [(3,)], [()], r"\(C\) or \(N, C\)"),
        ("x #1 | #group", [(1, 2, 1)], [(3,)], "of size 1 or of size group with group = 2"),
        ("x (_, _), y (_)", [(2, 3), (4,)], [(2,), (4,)], r"\(_, _\)"),
        ("sizes (n), x (n)", [(3,)], [(2,)], "x has .* with n = 3"),
    ],
)
def test_shapes(register, shapes, right, wrong, message):
    operator = register(lambda x, y=None, *, group=2, sizes=(): x, shapes=shapes)
    operator(*(full(*shape) for shape in right), sizes=[4, 5, 6])
    with pytest.raises(NodeError, match=message):
        operator(*(full(*shape) for shape in wrong), sizes=[4, 5, 6])


def test_shapes_of_what_is_not_there(register):
    """Omitted inputs, sequences and sizes of which nothing is known are not looked at."""
    operator = register(lambda x, y=None, *, n=None: x, shapes="x (n*c), y (c, rank E)")
    operator(None, full(2, 3))
    operator([full(3)], full(2, 3))
    operator(full(6), full(2, 3))
    with pytest.raises(NodeError, match="with c = 3"):
        operator(full(6), full(2, 3), n=2)
    with pytest.raises(ValueError, match="neither input nor attribute"):
        register(lambda x: x, shapes="y (N)")


def test_values(register):
    def function(
        x: Static | Positive,
        *,
        mode: Literal["up", "down"] = "up",
        size: Positive | None = None,
        pads: NotNegative = (),
        reach: Annotated[int, AtLeast(-1)] = -1,
    ):
        return mode

    operator = register(function)
    assert operator(np.array([1, 2]), mode="down", size=1, pads=[0, 1], reach=-1) == "down"
    assert jax.jit(lambda x: operator(x, size=None) and x)(full(2)).shape == (2,)
    for argument, attributes, message in (
        (1, {"mode": "left"}, "mode must be 'up' or 'down', got 'left'"),
        (1, {"mode": b"\xff"}, "must be .*got b'.xff'"),
        (1, {"size": 0}, "size must be positive, got 0"),
        (1, {"pads": [0, -1]}, r"pads must not be negative, got \[0, -1\]"),
        (1, {"pads": [float("nan")]}, "must not be negative"),
        (1, {"reach": -2}, "reach must be at least -1, got -2"),
        (0, {}, "x must be positive, got 0"),
    ):
        with pytest.raises(NodeError, match=message):
            operator(np.array(argument), **attributes)


def test_attributes_that_operators_share(register):
    class Shared(TypedDict, total=False):
        kernel: Required[Positive]
        mode: Annotated[Literal["a", "b"], Default("a")]
        pads: NotNegative

    def function(x, *, axis=0, **shared: Unpack[Shared]):
        return shared

    operator = register(function, without=("axis",))
    assert operator.attributes == {"kernel", "mode", "pads"}
    assert operator.required == {"kernel"}
    assert operator.defaults == {"mode": "a", "pads": None}
    assert operator(full(1), kernel=[1], mode="b") == {"kernel": [1], "mode": "b"}
    for wrong in ({"kernel": [0]}, {"mode": "c"}, {"pads": [-1]}):
        with pytest.raises(NodeError, match="must"):
            operator(full(1), **wrong)


def test_the_node_and_its_inputs_are_named():
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        g (float[2, 5, 3] x, float[5] s) => (float[2, 5, 3] y) {
            y = GroupNormalization <num_groups = 2> (x, s, s)
        }
    """)
    message = (
        r"node 'y' \(GroupNormalization, opset 20\): x has shape \[2, 5, 3\]; it must be "
        r"\(N, num_groups\*c, \*D\) with num_groups = 2 \[inputs x: float32\[2, 5, 3\], s: float32"
    )
    with pytest.raises(NodeError, match=message):
        jaxonnx.load(model)(full(2, 5, 3), full(5))


def test_sizes_that_are_open(register):
    """Sizes that `jax.export` leaves open are compared and divided as JAX does."""
    operator = register(lambda x, y: x, shapes="x (N, 2*c), y (c, _)")
    n, c = export.symbolic_shape("n, c")

    def trace(*shapes):
        values = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        return export.export(jax.jit(operator))(*values).out_avals

    assert trace((n, 2 * c), (c, 3))[0].shape == (n, 2 * c)
    with pytest.raises(NodeError, match="c = c"):
        trace((n, 2 * c), (c + 1, 3))

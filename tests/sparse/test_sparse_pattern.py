"""A pattern that is not N:M is one class: trained, recorded, proved, packed and unpacked."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest

import jaxonnx
from jaxonnx import demo, sparse
from jaxonnx.errors import SparsityError

RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Blocks(sparse.SparsityPattern):
    """Blocks are kept or dropped whole: the better half of those in each row of blocks."""

    size: int = 4
    density = 0.5

    @property
    def name(self):
        return f"blocks{self.size}"

    def misfit(self, shape, axes):
        output, inputs = (shape[a] for a in axes)
        fits = output and inputs and not (output % self.size or inputs % (2 * self.size))
        return "" if fits else f"{output} x {inputs} are not rows of an even number of blocks"

    def tiles(self, w, axes):
        """[batch..., rows, size, columns, size]"""
        w = jnp.moveaxis(w, axes, (-2, -1))
        rows, columns = (n // self.size for n in w.shape[-2:])
        return w.reshape(*w.shape[:-2], rows, self.size, columns, self.size)

    def search(self, w, axes):
        tiles = self.tiles(jnp.abs(w), axes)
        order = jnp.argsort(-tiles.sum((-3, -1)), axis=-1, stable=True)
        kept = jnp.argsort(order, axis=-1) < tiles.shape[-2] // 2
        wide = jnp.repeat(jnp.repeat(kept, self.size, -2), self.size, -1)
        return jnp.moveaxis(wide, (-2, -1), axes)

    def groups(self, kept, axes, along):
        shape = np.moveaxis(kept, axes, (-2, -1)).shape
        tiles = np.asarray(self.tiles(kept, axes))
        ones = tiles.sum((-3, -1), keepdims=True)
        *batch, _, columns, _ = ones.shape
        broken = ones % self.size**2 != 0
        broken |= (ones > 0).sum(-2, keepdims=True) > columns // 2
        # a product sums over a line of each block: a row along the input axis, or a column
        cells = (1, columns, self.size) if along == axes[0] else (self.size, columns, 1)
        line = (*batch, *cells)
        numbers = np.arange(np.prod(line)).reshape(line)
        return tuple(
            np.moveaxis(np.broadcast_to(x, tiles.shape).reshape(shape), (-2, -1), axes)
            for x in (numbers, broken)
        )


sparse.register("blocksB", r"blocks(\d+)", lambda found, _: Blocks(int(found[1])))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((8, 16), (0, 1)), ((16, 8), (1, 0)), ((8, 16, 3, 3), (0, 1)), ((2, 16, 8), (-1, -2))],
)
def test_the_best_blocks_are_kept_and_nothing_is_lost_in_packing(shape, axes):
    w = RNG.normal(size=shape).astype(np.float32)
    mask = np.asarray(sparse.mask(w, "blocks4", axes=axes))
    assert Blocks().holds(mask, axes)
    assert mask.mean() == 0.5
    one = np.moveaxis(w, axes, (-2, -1)).reshape(-1, *(shape[a] for a in axes))[0]
    kept = np.moveaxis(mask, axes, (-2, -1)).reshape(-1, *one.shape)[0]
    sums = np.abs(one).reshape(one.shape[0] // 4, 4, -1, 4).sum((1, 3))
    best = sums >= np.sort(sums, axis=1)[:, sums.shape[1] // 2, None]
    np.testing.assert_array_equal(kept, np.kron(best, np.ones((4, 4))))
    assert not Blocks().holds(np.ones(shape), axes)
    assert not Blocks().holds(mask & (w > 0), axes)
    pruned = np.where(mask, w, 0)
    packed = sparse.pack(pruned, mask, Blocks(), axis=axes[1])
    assert packed.nbytes == pruned.nbytes // 2 + w.size // 8
    np.testing.assert_array_equal(jax.jit(sparse.unpack)(packed), pruned)
    np.testing.assert_array_equal(sparse.unpack_mask(packed), mask)


def test_it_trains_in_three_phases():
    params = {"w": jnp.asarray(RNG.normal(size=(8, 16)), jnp.float32), "b": jnp.ones(8)}
    optimizer = sparse.three_phase(
        optax.adam(0.1), dense=1, dynamic=2, fixed=1, refresh=1, pattern="blocks4"
    )
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for i in range(5):
        gradients = jax.tree.map(lambda x, i=i: jnp.sin(9 * x + i), params)
        updates, state = step(gradients, state, params)
        params = optax.apply_updates(params, updates)
        assert Blocks().holds(params["w"], (0, 1))
        np.testing.assert_array_equal(params["w"] != 0, sparse.state_masks(state)["w"])
    assert sparse.metrics(state)["sparsity"] == 0.5


@pytest.mark.deep
def test_a_model_is_trained_recorded_proved_saved_and_read(tmp_path):
    data = (RNG.normal(size=(16, 1, 8, 8)).astype(np.float32), RNG.integers(0, 10, 16))
    result = jaxonnx.train(
        demo.model(),
        data,
        loss="softmax_cross_entropy_with_integer_labels",
        optimizer=optax.adam(0.01),
        epochs=2,
        batch_size=8,
        sparsity={"pattern": "blocks4"},
    )
    model = result.model
    layers = model.sparsity.layers
    assert {layer.pattern for layer in layers} == {Blocks(4)}
    products = sparse.verify(model).products
    assert {p.weight for p in products} == {layer.name for layer in layers}
    assert {p.part for p in products} == {"forward", "backward"}
    for name, options in (("a.onnx", {}), ("b.onnx", {"sparse": True}), ("c.npz", {})):
        model.save(tmp_path / name, **options)
        back = jaxonnx.load(tmp_path / name)
        assert back.sparsity == model.sparsity
        for weight, value in model.params.items():
            np.testing.assert_array_equal(back.params[weight], value)
    _, packed = sparse.load(tmp_path / "c.npz")
    assert {*packed} == {layer.name for layer in layers}
    assert all(p.pattern == Blocks(4) for p in packed.values())
    onnx.checker.check_model(onnx.load(tmp_path / "a.onnx"))


def test_the_proof_finds_what_breaks_the_pattern():
    w = np.array(RNG.normal(size=(8, 16)), np.float32)
    w = np.where(sparse.mask(w, "blocks4"), w, 0)
    x = jax.ShapeDtypeStruct((2, 16), np.float32)
    layers = sparse.layers({"w": w}, "blocks4")

    def proof(function, w):
        return sparse.verify(function, {"w": w}, x, layers=layers)

    proof(lambda p, x: x @ p["w"].T, w)
    with pytest.raises(SparsityError, match="no whole groups"):
        proof(lambda p, x: x[:, :3] @ p["w"].T[:3], w)
    holed = w.copy()
    holed[tuple(np.argwhere(w)[0])] = 0
    with pytest.raises(SparsityError, match="too full"):
        proof(lambda p, x: x @ p["w"].T, holed)


def test_damaged_bits_and_unknown_names_are_errors(tmp_path):
    w = {"w": np.where(sparse.mask(W := RNG.normal(size=(8, 16)), "blocks4"), W, 0)}
    layers = sparse.layers(w, "blocks4")
    path = tmp_path / "a.npz"
    sparse.save(path, w, {"w": w["w"] != 0}, layers=layers)
    _, packed = sparse.load(path)
    np.testing.assert_array_equal(np.asarray(sparse.unpack(packed)["w"]), w["w"].astype(np.float32))
    arrays = dict(np.load(path))
    for name, damaged in (("values:w", arrays["values:w"][:-1]), ("indices:w", np.zeros(16, "u1"))):
        np.savez(path, **arrays | {name: damaged})
        with pytest.raises(SparsityError, match="w: values of shape"):
            sparse.load(path)
    np.savez(path, **arrays | {"indices:w": arrays["indices:w"][:-1]})
    with pytest.raises(SparsityError, match="w: 15 bytes of indices"):
        sparse.load(path)
    with pytest.raises(
        SparsityError, match=r"'stripes' is not of the form zeros or N:M .* or blocksB"
    ):
        sparse.mask(w["w"], "stripes")
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (sparse.SparsityPattern,), {})()


def test_a_pattern_that_is_neither_a_name_nor_one_is_refused():
    with pytest.raises(jaxonnx.SparsityError, match=r"a name like '2:4'.* got 24"):
        sparse.layers({"w": np.ones((4, 4))}, {"w": 24})


class FixedBlocks(Blocks):
    is_fixed = True


def test_a_pattern_of_the_initial_weights_names_its_method():
    x, y = np.zeros((8, 1, 8, 8), np.float32), np.zeros((8, 10), np.float32)
    with pytest.raises(jaxonnx.TrainingError, match=r"'blocks4' .* pass method 'one_shot'"):
        jaxonnx.train(
            demo.mlp(), (x, y), loss="squared_error", epochs=3,
            sparsity={"pattern": FixedBlocks(), "method": "sr_ste"},
        )  # fmt: skip

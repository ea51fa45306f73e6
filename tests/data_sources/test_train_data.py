"""The forms that data comes in: the same examples give the same run."""

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxonnx
from jaxonnx._data.batches import Arrays, MemoryPool, prefetch
from jaxonnx.cli import main
from tests.support.sources import make_source

ONE = (jaxonnx.Value("x", None, None),)
TEXT = """<ir_version: 8, opset_import: ["": 17]>
    net (float[n, 2] x) => (float[n, 1] y) <float[2, 1] w = {0.5, -0.25}> { y = MatMul(x, w) }"""
PAIR = """<ir_version: 8, opset_import: ["": 17]>
    net (float[n, 2] a, float[n, 1] b) => (float[n, 1] y) <float[2, 1] w = {0.5, -0.25}>
    { s = MatMul(a, w) y = Add(s, b) }"""
FIXED = TEXT.replace("n,", "4,")
X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
Y = X[:, :1] * 2
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 12, 4)]


@pytest.fixture(scope="module")
def net():
    return jaxonnx.load(onnx.parser.parse_model(TEXT))


def train(model, data, **wanted):
    wanted = {"loss": "squared_error", "optimizer": optax.sgd(0.1), "epochs": 2} | wanted
    return jaxonnx.train(model, data, **wanted)


def losses(model, data, **wanted):
    return train(model, data, **wanted).history.losses


@pytest.fixture(scope="module")
def whole(net):
    """The losses for data in one piece."""
    return losses(net, (X, Y), batch_size=4)


@pytest.fixture(scope="module")
def in_order(net):
    """The losses for the batches in their order."""
    return losses(net, BATCHES)


def network(dtype):
    """The network of TEXT in another type."""
    proto = onnx.parser.parse_model(TEXT)
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = kind
    (w,) = proto.graph.initializer
    w.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(w).astype(dtype), "w"))
    return proto


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_of_rows_take_the_type_of_their_input(dtype, tmp_path, monkeypatch):
    """Text has none, .parquet and data sets have no bfloat16; arrays must have it."""
    monkeypatch.chdir(tmp_path)
    datasets = pytest.importorskip("datasets")
    model = jaxonnx.load(network(dtype))
    numbers = [[1, 2], [3, 300], [-5, 0], [7, 8]]
    array = np.array(numbers).astype(dtype)
    expected = model.predict(array)
    assert expected.dtype == dtype
    rows = [{"x": x, "y": [i]} for i, x in enumerate(numbers)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("rows.csv").write_text("x,y\n" + "".join(f'"{x}",[{i}]\n' for i, x in enumerate(numbers)))
    rows = datasets.Dataset.from_list(rows)
    rows.to_parquet("rows.parquet")
    for data in ("rows.jsonl", "rows.csv", "rows.parquet", rows, {"x": numbers}):
        np.testing.assert_array_equal(model.predict(data), expected)
    of_rows, of_arrays = (
        jaxonnx.evaluate(model, data, loss="squared_error", batch_size=4)["loss"]
        for data in (rows.to_iterable_dataset(), (array, np.array(rows["y"])))
    )
    assert of_rows == pytest.approx(of_arrays, rel=1e-6)
    np.savez("arrays.npz", x=array)
    np.testing.assert_array_equal(model.predict("arrays.npz"), expected)
    with pytest.raises(jaxonnx.InputError, match=f"astype.'{dtype}'"):
        model.predict(np.array(numbers))


PIPELINE = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>
g (float[n, 1] time, string[n, 1] booking) => (float[n, 3] y) <int64[2] rows = {-1, 2}> {
    ones = ai.onnx.ml.OneHotEncoder <cats_strings = ["web", "desk"]> (booking)
    kinds = Reshape (ones, rows)
    y = Concat <axis = 1> (time, kinds)
}"""


def test_columns_of_a_table_for_a_pipeline(tmp_path, monkeypatch):
    """skl2onnx writes an input [n, 1] for each column of a table."""
    monkeypatch.chdir(tmp_path)
    datasets = pytest.importorskip("datasets")
    model = jaxonnx.load(onnx.parser.parse_model(PIPELINE))
    rows = [{"time": 3, "booking": "desk"}, {"time": 5, "booking": "web"}]
    Path("rows.csv").write_text("time,booking\n3,desk\n5,web\n")
    Path("row.jsonl").write_text(json.dumps(rows[0]))
    expected = [[3, 0, 1], [5, 1, 0]]
    for data in ("rows.csv", datasets.Dataset.from_list(rows)):
        np.testing.assert_array_equal(model.predict(data), expected)
    np.testing.assert_array_equal(model.predict("row.jsonl"), expected[:1])
    model.save("net.onnx")
    assert main(["run", "net.onnx", "rows.csv", "-o", "y.npz"]) == 0
    np.testing.assert_array_equal(np.load("y.npz")["y"], expected)
    with pytest.raises(jaxonnx.TrainingError, match=r"time: float32\[n, 1\] has rank 2"):
        model.predict({"time": np.ones(2, np.float32), "booking": np.array(["web", "desk"])})


@pytest.mark.parametrize("name", ["rows.csv", "arrays.npz"])
def test_a_command_reads_numbers_for_bfloat16(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(network("bfloat16"), "net.onnx")
    array = np.array([[1, 2], [3, 4]]).astype(jnp.bfloat16)
    Path("rows.csv").write_text('x,y\n"[1, 2]",[1]\n"[3, 4]",[2]\n')
    np.savez("arrays.npz", x=array, y=np.ones((2, 1)))
    assert main(["run", "net.onnx", name, "-o", "out.npz"]) == 0
    result = np.load("out.npz")["y"].view(jnp.bfloat16)
    np.testing.assert_array_equal(result, jaxonnx.load("net.onnx")(array))


def test_data_in_one_piece(net, whole, tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=X, target=Y)
    for data in (path, str(path), {"x": X, "y": Y}, {"anything": jnp.asarray(Y), "x": X.tolist()}):
        x = data["x"] if isinstance(data, dict) else None
        if isinstance(x, list):
            data["x"] = np.asarray(x, np.float32)
        assert losses(net, data, batch_size=4) == whole
    # one input, whatever its name, may be called x
    other = jaxonnx.load(
        onnx.parser.parse_model(TEXT.replace(" x)", " images)").replace("(x,", "(images,"))
    )
    np.savez(path, x=X, y=Y)
    assert losses(other, path, batch_size=4) == whole
    # a batch size that the file fixes holds for all of them, unless another is asked for
    fixed = jaxonnx.load(onnx.parser.parse_model(FIXED))
    assert losses(fixed, path) == whole
    assert losses(fixed, path, batch_size=3) == losses(net, path, batch_size=3)


def test_several_inputs_and_targets():
    model = jaxonnx.load(onnx.parser.parse_model(PAIR))
    b = X[:, 1:]

    def loss(outputs, targets):
        return jnp.square(outputs - targets["c"] - targets["d"])

    targets = {"c": Y, "d": b}
    expected = losses(model, ((X, b), targets), loss=loss)
    assert losses(model, {"d": b, "b": b, "a": X, "c": Y}, loss=loss) == expected
    assert losses(model, [{"b": b, "a": X, **targets}], loss=loss, epochs=1)


@pytest.mark.parametrize("kind", ["list", "dicts", "lists", "function", "jax"])
def test_batches(net, in_order, kind):
    data = {
        "list": BATCHES,
        "dicts": [{"x": x, "y": y} for x, y in BATCHES],
        "lists": [[x, y] for x, y in BATCHES],
        "function": lambda epoch: iter(BATCHES),
        "jax": jax.tree.map(jnp.asarray, BATCHES),
    }[kind]
    assert losses(net, data) == in_order


def test_grain(net, in_order):
    import grain

    class Source:
        def __len__(self):
            return len(X)

        def __getitem__(self, i):
            return {"x": X[i], "y": Y[i]}

    source = Source()
    dataset = grain.MapDataset.source(source).batch(4)
    assert losses(net, dataset) == in_order
    assert losses(net, dataset.to_iter_dataset()) == in_order
    assert losses(net, lambda epoch: dataset.to_iter_dataset()) == in_order
    sampler = grain.samplers.IndexSampler(
        num_records=12,
        num_epochs=1,
        shard_options=grain.sharding.NoSharding(),
        shuffle=False,
        seed=0,
    )
    loader = grain.DataLoader(
        data_source=source, sampler=sampler, operations=[grain.transforms.Batch(4)], worker_count=0
    )
    assert losses(net, loader) == in_order
    with pytest.raises(jaxonnx.TrainingError, match="make batches"):
        train(net, grain.MapDataset.source(np.arange(12.0)).map(lambda v: (v, v)))


def test_hugging_face_datasets(net, in_order, whole):
    import datasets

    data = datasets.Dataset.from_dict({"x": X, "y": Y})
    data = data.cast_column("x", datasets.Sequence(datasets.Value("float32")))
    data = data.cast_column("y", datasets.Sequence(datasets.Value("float32")))
    assert losses(net, data, batch_size=4) == whole
    assert losses(net, data.with_format("numpy"), batch_size=4) == whole
    assert losses(net, lambda epoch: data.with_format("numpy").iter(batch_size=4)) == in_order
    text = data.add_column("text", ["a"] * 12)
    with pytest.raises(jaxonnx.TrainingError, match="not an input must be left out"):
        train(net, text.with_format("numpy"))


def test_torch(net, in_order):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    assert losses(net, loader) == in_order
    assert losses(net, (torch.tensor(X), torch.tensor(Y)), batch_size=4)


class Tensor:
    """What the tensors of all frameworks have in common: NumPy converts them."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: dict(zip("xy", pair, strict=True))])
def test_tensors_of_other_frameworks(net, in_order, kind):
    """Batches of a data set that is iterated once an epoch, in the forms that loaders give them."""

    class Dataset:
        def __iter__(self):
            return (kind([Tensor(x), Tensor(y)]) for x, y in BATCHES)

    assert losses(net, Dataset()) == in_order
    assert losses(net, lambda epoch: iter(Dataset())) == in_order


def test_a_share_for_validation(net):
    model = train(net, (X, Y), validation=0.25, batch_size=4, optimizer=optax.sgd(0.0)).model

    def parts(seed):
        data, held_out = make_source((X, np.arange(12)), ONE, 4, seed).split(0.25)
        rows = [
            np.concatenate([b.targets[b.weight > 0] for b in d.batches(1)])
            for d in (data, held_out)
        ]
        return [set(r) for r in rows], rows

    (rest, held), (_, order) = parts(0)
    assert len(held) == 3
    assert rest | held == {*range(12)}
    assert [*order] == sorted(order)
    assert parts(0)[0] == [rest, held]
    assert parts(1)[0] != [rest, held]
    row = train(net, (X, Y), validation=0.25, optimizer=optax.sgd(0.0)).history.epochs[0]
    chosen = sorted(held)
    error = float(((model(X) - Y)[np.array(chosen)] ** 2).mean())
    assert row["validation_loss"] == pytest.approx(error, rel=1e-5)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    count=st.integers(1, 40),
    size=st.integers(1, 12),
    seed=st.integers(0, 9),
    share=st.none() | st.floats(0.1, 0.9),
    cut=st.integers(0, 5),
)
def test_every_example_counts_once(count, size, seed, share, cut):
    values = np.arange(count, dtype=np.float32)
    try:
        source = make_source((values, values), ONE, size, seed)
        parts = (source,) if share is None else source.split(share)
    except jaxonnx.TrainingError:
        assert round(count * share) in (0, count)
        return
    seen = []
    for part in parts:
        batches = [*part.batches(3)]
        assert len(batches) == part.steps
        assert all(b.inputs[0].shape == b.weight.shape == (size,) for b in batches)
        seen += [v for b in batches for v in b.targets[b.weight > 0]]
        rest = [*part.batches(3, cut)]
        jax.tree.map(np.testing.assert_array_equal, rest, batches[cut:])
    assert sorted(seen) == values.tolist()


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    first=st.integers(1, 6),
    cut=st.integers(0, 5),
)
def test_short_batches_of_an_iterable(sizes, first, cut):
    sizes = [first, *(min(size, first) for size in sizes)]
    ends = np.cumsum(sizes)
    rows = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    stream = make_source([(r, r) for r in rows], ONE)
    batches = [*stream.batches(0)]
    assert all(len(b.targets) == len(b.weight) == first for b in batches)
    for row, batch in zip(rows, batches, strict=True):
        np.testing.assert_array_equal(batch.targets[batch.weight > 0], row)
        assert set(batch.targets[batch.weight == 0]) <= {*range(row[-1] + 1)}
    jax.tree.map(np.testing.assert_array_equal, [*stream.batches(0, cut)], batches[cut:])


def test_data_is_made_while_steps_run(net):
    """The host asks for all batches long before the device is done with their steps."""
    asked = []

    def data(epoch):
        for batch in BATCHES * 2:
            asked.append(time.perf_counter())
            yield batch

    def loss(outputs, targets):
        slow = jnp.full((256, 256), 1e-3) * jax.lax.stop_gradient(outputs.sum())
        slow = jax.lax.fori_loop(0, 100, lambda i, x: jnp.tanh(x @ x), slow)
        return ((outputs - targets) ** 2).mean() + 0 * slow.sum()

    train(net, data, loss=loss, epochs=1)
    # the first step includes compiling
    assert asked[-1] - asked[1] < 0.5 * (time.perf_counter() - asked[1])


def test_errors_of_the_data_keep_their_message_and_place(net):
    def data(epoch):
        yield BATCHES[0]
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="on fire") as caught:
        train(net, data)
    assert caught.traceback[-1].name == "data"


BAD = {
    "no file": ("missing.npz", {}, "'missing.npz' cannot be read"),
    "no npz": (__file__, {}, "cannot be read|must be an .npz"),
    "kind": (3, {}, "a pair .* or a function .* it is an int"),
    "lacks": ({"z": X, "y": Y}, {}, "lacks the model's input 'x'"),
    "no target": ({"x": X}, {}, r"data has no targets: pass \(x, y\), or a dict with the"),
    "words": ((X, np.array(["a"] * 12)), {}, "the targets must be numbers, got <U1"),
    "no number": ((X, [*Y[:3], [None], *Y[4:]]), {}, "the targets must .*, and example 3 has None"),
    "no length": ({"x": [X[0], None, [1]], "y": Y[:3]}, {}, "'x' must .*, and example 1 has None"),
    "no numbers": ({"x": X, "y": [None] * 12}, {}, "every example has None: leave the column out"),
    "no weight": ((X, Y, np.array([1, None] * 6)), {}, "the weights must .*, and example 1 has"),
    "share of batches": (BATCHES, {"validation": 0.2}, "is a fraction"),
    "whole share": ((X, Y), {"validation": 1.0}, "between 0 and 1 of the 12"),
    "flag": ((X, Y), {"validation": True}, "validation=True"),
    "tiny share": ((X, Y), {"validation": 0.01}, "leaves some on either side"),
    "batch size": (BATCHES, {"batch_size": 4}, r"batches have their own size.*\(np.stack"),
    "size of rows": (
        [{"x": X[0], "y": 1}],
        {"batch_size": 4},
        r"pass columns, \{'x': \[row\['x'\] for row in data\], ...\}",
    ),
    "texts": (
        {"tokens": [["a", "b"], ["c"]], "y": [0, 1]},
        {},
        "'tokens' has texts: the tokenizer",
    ),
    "half": ((X, Y), {"batch_size": 0.5}, "integer of at least 1, got 0.5"),
    "shape": ([BATCHES[0], (X[:4], X[:4])], {}, r"batch 2 of data in epoch 1 has \(shape"),
    "dtype": (
        [BATCHES[0], (X[:4], Y[:4].astype(np.float64))],
        {},
        "batch 2 of data in epoch 1 has .*float64",
    ),
    "structure": (
        [BATCHES[0], (X[:4], {"a": Y[:4]})],
        {},
        "batch 2 of data in epoch 1 has targets",
    ),
    "validation": ((X, Y), {"validation": (X, Y[:3])}, "validation has different numbers"),
    "targets": ((X, Y), {"validation": (X, Y[:, 0])}, r"validation: the loss .* shape \(32, 1\)"),
    "batches": ((X, Y), {"validation": [(X[:, :1], Y)]}, "validation: input x"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(net, case):
    data, wanted, message = BAD[case]
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(net, data, **wanted)


ROWS = [{"x": [1.0, 2.0], "y": [0.0]}, {"x": [2.0, 0.0], "y": [1.0]}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FILES = {
    "a.json": json.dumps(ROWS).encode(),
    "a.jsonl": json.dumps(ROWS).encode(),
    "a.csv": b'x,y\n"[1.0, 2.0]",[0.0]\n"[2.0, 0]",[1.0]\n',
    "a.tsv": b"x\ty\n[1.0, 2.0]\t[0.0]\n[2.0, 0]\t[1.0]\n",
    "bom.jsonl": LINES.encode("utf-8-sig"),
    "utf16.jsonl": LINES.encode("utf-16"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_numbers(net, name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    (tmp_path / "b.jsonl").write_text(LINES, "utf-8")
    losses = [train(net, tmp_path / name).history.losses for name in (name, "b.jsonl")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.txt", b"a", r"must be an \.npz file, .*\.jsonl"),
        ("empty.jsonl", b"\n", "it is empty, and must be an .npz file, a .jsonl file"),
        ("a.csv", b"x,y\n1,2\n3\n", "line 3 of .* it has 1 cells"),
        ("a.jsonl", b'{"x": 1}\n{"y": 1}', "line 2 of .* it has the columns y, and those before"),
    ],
)
def test_other_files_are_refused(net, name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(net, tmp_path / name)
    with pytest.raises(jaxonnx.TrainingError, match=message):
        train(net, (X, Y), validation=tmp_path / name)


def test_columns_of_numbers_are_renamed(net, whole, tmp_path):
    np.savez(tmp_path / "a.npz", a=X, b=Y)
    (tmp_path / "a.jsonl").write_text(LINES.replace('"y"', '"b"').replace('"x"', '"a"'))
    (tmp_path / "b.jsonl").write_text(LINES)
    names = {"a": "x", "b": "y"}
    for data in ({"a": X, "b": Y}, tmp_path / "a.npz"):
        assert losses(net, data, batch_size=4, columns=names) == whole
    renamed = losses(net, tmp_path / "a.jsonl", columns=names)
    assert renamed == losses(net, tmp_path / "b.jsonl")
    with pytest.raises(jaxonnx.TrainingError, match="columns has 'c', and data has the columns"):
        train(net, {"a": X, "b": Y}, columns={"c": "x"})
    with pytest.raises(jaxonnx.TrainingError, match="columns= renames columns of rows, of files"):
        train(net, (X, Y), columns=names)
    with pytest.raises(jaxonnx.TrainingError, match="columns must be a dict from the names"):
        train(net, (X, Y), columns="x")


def test_other_containers(net):
    """Splits by name and streams are read; the rest is refused with what makes it train."""
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    expected = train(net, rows).history.losses
    for data in (datasets.DatasetDict(train=rows), rows.to_iterable_dataset()):
        np.testing.assert_allclose(train(net, data).history.losses, expected, rtol=1e-6)
    conversions = {
        r"data\['held'\]$": datasets.DatasetDict(held=rows),
        r"\{'text': text\} for text in data\] makes rows": ["a", "b"],
    }
    for message, data in conversions.items():
        for split in ({"data": data}, {"data": (X, Y), "validation": data}):
            with pytest.raises(jaxonnx.TrainingError, match=message):
                train(net, **split)
    for empty in ([], rows.select([])):
        with pytest.raises(jaxonnx.TrainingError, match="data has no examples"):
            train(net, empty)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(2.0**18, dtype=np.float32).reshape(64, 64, 64),
        np.arange(2**18).astype(jnp.bfloat16).reshape(64, -1),
        np.arange(2**18).reshape(-1, 64).T,
        np.arange(64),
    ],
    ids=["float32", "bfloat16", "transposed", "small"],
)
def test_memory_of_batches_is_used_again_once_nothing_refers_to_it(array):
    memory = MemoryPool(array, 16)
    chosen = np.random.default_rng(0).permutation(64)[:48].reshape(3, 16)
    one, two = (memory.rows(rows) for rows in chosen[:2])
    np.testing.assert_array_equal(one, array[chosen[0]])
    part, where = one[3:, 1:] if one.ndim > 1 else one[3:], one.ctypes.data
    del one
    three = memory.rows(chosen[2])
    assert not np.shares_memory(part, three)
    assert not np.shares_memory(two, three)
    np.testing.assert_array_equal(two, array[chosen[1]])
    np.testing.assert_array_equal(three, array[chosen[2]])
    if memory.again:
        assert where % 64 == 0
        del part
        assert memory.rows(chosen[0]).ctypes.data == where


def test_a_batch_keeps_its_values_while_a_step_may_read_it():
    x = np.random.default_rng(0).standard_normal((1600, 512)).astype(np.float32)
    w = jnp.ones((512, 512)) / 32
    slow = jax.jit(lambda x, w: (x @ w @ w @ w @ w @ w @ w).sum() * 0 + x.sum(1))
    batches = Arrays((x,), np.arange(1600), 32, 0, np.arange(1600)).batches(0)
    seen = [(slow(batch.inputs[0], w), batch.targets) for batch in batches]
    for sums, rows in seen:
        np.testing.assert_allclose(sums, x[rows].sum(1), rtol=1e-3, atol=1e-3)


def test_a_few_are_under_way():
    begun = []
    late = prefetch((begun.append(i) or i for i in range(5)), 2)
    assert (next(late), begun) == (0, [0, 1, 2])
    assert [*late] == [1, 2, 3, 4]
    assert [*prefetch(iter("ab"), 2)] == ["a", "b"]

"""What the zoo compares, on stored networks of PyTorch, and that it sees what is wrong.

`python -m tests.oracles.torch_zoo --network SPEC --write tests/data/zoo/NAME` wrote each file.
"""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.oracles.zoo_compare import Golden, Numbers, compare
from tests.support.paths import DATA

NETWORKS = {
    "image": "legacy 17 image batch_norm:3 conv:4 group_norm:5 squeeze_excite:1",
    "sequence": "dynamo 20 sequence rotary:3 recurrent:5 layer_norm:1 gated:0",
    "tokens": "legacy 14 tokens encoder_layer:2 layer_norm:1",
    "vector": "dynamo 18 vector shared_twice:1 linear:2 standardized:0",
}
"""The stored networks, as `torch_zoo` writes them."""
each_network = pytest.mark.parametrize("name", NETWORKS)


def read(name: str) -> tuple[bytes, Golden]:
    path = DATA / "zoo" / name
    return path.with_suffix(".onnx").read_bytes(), Golden.read(path.with_suffix(".npz"))


def kinds(found) -> set[tuple[str, str]]:
    return {(f.kind, f.tensor) for f in found if not f.why}


@each_network
def test_what_is_trained_is_what_pytorch_trains(name):
    content, golden = read(name)
    assert [*compare(content, golden, run=False)] == []


@pytest.mark.deep
@each_network
def test_outputs_gradients_and_five_steps_are_those_of_pytorch(name):
    content, golden = read(name)
    assert len(golden.losses) == 5
    assert len(golden.accumulated) == 10
    assert [*compare(content, golden)] == []


def test_a_buffer_that_is_trained_is_found():
    content, golden = read("vector")
    params = {**golden.params}
    buffers = {**golden.buffers, "moved": params.pop("1.0.weight")}
    found = compare(content, replace(golden, params=params, buffers=buffers), run=False)
    assert kinds(found) == {("trained", "moved")}


def test_a_parameter_that_is_frozen_is_found():
    content, golden = read("vector")
    mean = golden.buffers["2.mean"]
    params, gradients = ({**d, "2.mean": mean} for d in (golden.params, golden.gradients))
    found = compare(content, replace(golden, params=params, gradients=gradients), run=False)
    assert kinds(found) == {("frozen", "2.mean")}


def test_a_tie_that_came_apart_is_found():
    content, golden = read("vector")
    proto = onnx.ModelProto.FromString(content)
    (weight,) = (
        t
        for t in proto.graph.initializer
        if numpy_helper.to_array(t).T.tobytes() == golden.params["0.0.weight"].tobytes()
        or numpy_helper.to_array(t).tobytes() == golden.params["0.0.weight"].tobytes()
    )
    readers = [node for node in proto.graph.node if weight.name in node.input]
    assert len(readers) == 2
    other = proto.graph.initializer.add()
    other.CopyFrom(weight)
    other.name = "apart"
    readers[1].input[[*readers[1].input].index(weight.name)] = "apart"
    found = compare(proto.SerializeToString(), golden, run=False)
    assert kinds(found) == {("untied", "0.0.weight")}


@pytest.mark.deep
def test_wrong_outputs_gradients_and_losses_are_found():
    content, golden = read("vector")
    changed = {**golden.gradients}
    changed["1.0.weight"] = changed["1.0.weight"] * 1.01
    wrong = {"losses": golden.losses * 1.01, "accumulated": golden.accumulated * 1.01}
    found = [*compare(content, replace(golden, gradients=changed, **wrong))]
    assert kinds(found) == {("gradient", "1.0.weight"), ("adam", ""), ("accumulated", "")}
    found = [*compare(content, replace(golden, output=golden.output + 1))]
    assert ("outputs", "") in kinds(found)


def test_goldens_are_read_as_they_were_written(tmp_path):
    _, golden = read("vector")
    golden.save(tmp_path / "golden.npz")
    again = Golden.read(tmp_path / "golden.npz")
    for name, value in vars(golden).items():
        np.testing.assert_equal(getattr(again, name), value)


def test_numbers_that_are_there_twice_tell_no_place():
    numbers = Numbers({"a": np.array([1.0, 2.0]), "b": np.array([[2.0], [3.0]])})
    assert numbers.once.tolist() == [True, False, False, True]
    assert numbers.find(np.array([3.0, 1.0, 5.0])).tolist() == [3, 0, -1]

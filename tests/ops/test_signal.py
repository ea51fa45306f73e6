"""Signal operators: refusals, one-point windows, round trips."""

import jax
import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import jaxonnx.ops  # registers the operators
from jaxonnx.errors import NodeError
from jaxonnx.registry import lookup

dft, stft = (lookup("", name, 20) for name in ("DFT", "STFT"))
X = np.random.default_rng(0).normal(size=(2, 6, 1)).astype(np.float32)


@pytest.mark.parametrize("name", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_a_periodic_window_of_one_sample_is_the_formula(name):
    node = helper.make_node(name, ["size"], ["w"])
    (wanted,) = ReferenceEvaluator(node).run(None, {"size": np.array(1)})
    window = lookup("", name, 20)
    np.testing.assert_allclose(window(np.array(1)), wanted, atol=1e-7)
    np.testing.assert_array_equal(window(np.array(1), periodic=0), [1])


def test_onesided_round_trip():
    y = dft(dft(X, onesided=1), onesided=1, inverse=1)
    np.testing.assert_allclose(y, X, atol=1e-6)


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("window", [None, np.hanning(16).astype(np.float32)])
def test_frames_of_a_signal_without_a_last_axis(onesided, window):
    """PyTorch writes torch.stft so at opset 17."""
    signal = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    y = stft(signal, np.array(4), window, np.array(16), onesided=onesided)
    node = helper.make_node("STFT", ["x", "step", "w" * (window is not None), "n"], ["y"])
    node.attribute.append(helper.make_attribute("onesided", onesided))
    sizes = [helper.make_tensor(name, 7, [], [value]) for name, value in (("step", 4), ("n", 16))]
    stored = [] if window is None else [numpy_helper.from_array(window, "w")]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", 1, [2, 64])],
        [helper.make_tensor_value_info("y", 1, None)],
        [*sizes, *stored],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (wanted,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": signal})
    np.testing.assert_allclose(y, wanted, atol=1e-5)
    np.testing.assert_allclose(jaxonnx.load(proto)(signal), wanted, atol=1e-5)


def test_no_warning_without_x64():
    with jax.enable_x64(False):
        assert dft(X).dtype == np.float32


def test_refusals():
    with pytest.raises(NodeError, match="last axis"):
        dft(X, None, np.array(-1))
    with pytest.raises(NodeError, match="last axis"):
        dft(X[..., 0])
    with pytest.raises(NodeError, match="must be 2 for this onesided"):
        dft(X, inverse=1, onesided=1)
    with pytest.raises(NodeError, match="must be 1 for this onesided"):
        dft(np.concatenate([X, X], axis=-1), onesided=1)
    with pytest.raises(NodeError, match="positive, got 0"):
        dft(np.zeros((2, 1, 2), np.float32), inverse=1, onesided=1)
    with pytest.raises(NodeError, match="positive, got -1"):
        dft(X, np.array(-1))
    with pytest.raises(NodeError, match="window"):
        stft(X, np.array(2), np.ones(3, np.float32), np.array(4))
    with pytest.raises(NodeError, match="do not fit"):
        stft(X, np.array(2), None, np.array(9))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((8, 16, 0, 0, 4096), "no bank has 8 filters"),
        ((8, 16, -8192, 0, 4096), "no bank has"),
        ((8, -2, 8192, 0, 4096), "for -2 samples"),
        ((-1, 16, 8192, 0, 4096), "no bank has -1 filters"),
        ((8, 16, 8192, -900, 4096), "no bank has"),
        ((8, 16, 8192, 0, np.inf), "no bank has"),
        ((8, 16, 8192, 0, 9000), "beyond the 9 bins"),
        ((8, 16, 8192, 9000, 0), "beyond the 9 bins"),
    ],
)
def test_mel_filters_lie_within_the_spectrum(inputs, message):
    """Onnxruntime refuses them; the reference writes to the last bins, or fails."""
    mel = lookup("", "MelWeightMatrix", 17)
    with pytest.raises(NodeError, match=message):
        mel(*(np.array(value) for value in inputs))


@pytest.mark.parametrize("periodic", [0, 1])
def test_windows_have_samples(periodic):
    with pytest.raises(NodeError, match="size must be positive, got -2"):
        lookup("", "HannWindow", 17)(np.array(-2), periodic=periodic)

"""Outputs of a file in onnxruntime, as users run it and without graph optimizations, and here."""

import onnxruntime

import jaxonnx
from tests.support.exact_products import avoid_saturation


def outputs_everywhere(proto, feeds):
    """Yield the first output of both sessions of onnxruntime and of the reloaded file."""
    file = avoid_saturation(proto).SerializeToString()
    for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        providers = ["CPUExecutionProvider"]
        yield onnxruntime.InferenceSession(file, options, providers=providers).run(None, feeds)[0]
    yield jaxonnx.load(proto)(**feeds)

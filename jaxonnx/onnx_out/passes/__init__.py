"""Passes over a finished graph, which make it quick in onnxruntime."""

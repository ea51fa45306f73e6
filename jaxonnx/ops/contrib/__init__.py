"""Operators of com.microsoft, which onnxruntime defines, and experimental ones of early ONNX."""

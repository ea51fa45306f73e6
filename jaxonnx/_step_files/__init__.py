"""Training steps as files: export to ONNX with a manifest and a web page, and the way back."""

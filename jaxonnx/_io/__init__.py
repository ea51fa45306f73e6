"""Read and write model files: a ModelProto and its tensors."""

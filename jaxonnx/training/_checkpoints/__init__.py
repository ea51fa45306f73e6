"""States to go back to: snapshots in memory, folders of Orbax, files of onnxruntime-training."""

"""States that a run goes back to: snapshots in memory, folders of Orbax and onnxruntime's files."""

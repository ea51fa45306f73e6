"""The objective of a run: losses of outputs and their needs, metrics, and tables of `evaluate`."""

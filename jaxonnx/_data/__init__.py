"""Kinds of data, and their batches. Each kind is a module that registers it."""

from jaxonnx._data import arrays, datasets, image_folders

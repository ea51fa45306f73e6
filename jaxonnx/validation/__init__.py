"""Validation of a model: outputs, gradients, files, integers and sparsity, each with its proof."""

from jaxonnx.validation._validate import Check, Validation, find_changes, validate

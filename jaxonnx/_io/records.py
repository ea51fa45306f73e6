"""Records in a file: entries of the ModelProto's `metadata_props` that hold JSON."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from onnx import ModelProto

from jaxonnx._files import wrap_errors
from jaxonnx.errors import ModelError

SPARSITY = "jaxonnx.sparsity"
"""Which weights are sparse, and how (`jaxonnx._io.packed`)."""

QUANTIZATION = "jaxonnx.quantization"
"""The tensors that are rounded, and those written as integers (`jaxonnx.quantization`)."""

ADAPTERS = "jaxonnx.adapters"
"""The names of tensors that are factors of adapters (`jaxonnx.lora`)."""

IMAGE = "jaxonnx.image"
"""The preprocessing of the network's pictures, and the names of its classes."""

T = TypeVar("T")


def has(proto: ModelProto, key: str) -> bool:
    """Check whether there is a record under this key."""
    return any(entry.key == key for entry in proto.metadata_props)


def get(proto: ModelProto, key: str, make: Callable[[Any], T]) -> T | None:
    """Return `make` of the record under this key, None if the file has no such record.

    Raises:
      ModelError: the entry is not JSON, or not what `make` takes.
    """
    for entry in proto.metadata_props:
        if entry.key == key:
            with wrap_errors(f"metadata_props: '{key}' is malformed", ModelError):
                return make(json.loads(entry.value))
    return None


def damage(proto: ModelProto, key: str, make: Callable[[Any], Any]) -> str:
    """Say why `make` does not take the record under this key; empty if it does."""
    try:
        get(proto, key, make)
    except ModelError as error:
        return str(error)
    return ""


def put(proto: ModelProto, key: str, value: Any) -> None:
    """Replace the record under this key; None removes it."""
    others = [entry for entry in proto.metadata_props if entry.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(others)
    if value is not None:
        proto.metadata_props.add(key=key, value=json.dumps(value))


def rename_sparse(proto: ModelProto, names: Mapping[str, str]) -> None:
    """Rename weights in the record of sparse ones; one that is malformed stays as it is."""
    if has(proto, SPARSITY) and not damage(proto, SPARSITY, lambda entry: dict(entry["weights"])):
        entry = get(proto, SPARSITY, dict) or {}
        weights = {names.get(name, name): settings for name, settings in entry["weights"].items()}
        put(proto, SPARSITY, entry | {"weights": weights})

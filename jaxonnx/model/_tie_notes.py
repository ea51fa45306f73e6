"""Notes on tied weights, and on tensors that are not trained, for `print(model)`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from onnx import GraphProto

from jaxonnx._graph.roles import Roles
from jaxonnx._io.ties import sources, tied_names
from jaxonnx._text import list_some

_COMPARED = 2**16
"""The most numbers of a parameter that is compared with others."""


def describe_ties(
    proto: GraphProto, tensors: Mapping[str, Any], params: Collection[str]
) -> Iterator[str]:
    """Describe the parameters that are tied, and those that could be (`load(tied=)`)."""
    tied = {name: of for name, of in tied_names(proto, tensors).items() if of in params}
    for of in dict.fromkeys(tied.values()):
        names = list_some(f"'{name}'" for name, root in tied.items() if root == of)
        yield f"'{of}' and {names} are one weight"
    untied = [f"'{name}'" for name in sources(proto, tensors) if name in params]
    if untied:
        yield (
            f"not {list_some(untied)}: equal to another weight, which the file has in its place, "
            "and trained separately; load(..., tied=) ties them"
        )


def describe_complements(tensors: Mapping[str, Any], params: Collection[str]) -> Iterator[str]:
    """Yield the parameters that are 1 - another, as PyTorch's older exporter computes them."""
    small = [name for name in params if 1 < tensors[name].size <= _COMPARED]
    values = {name: np.asarray(tensors[name]) for name in small}
    names = {value.tobytes(): name for name, value in values.items()}
    for name, value in values.items():
        other = names.get((1 - value).astype(value.dtype).tobytes())
        if other is not None and len(np.unique(value)) > 2:  # no zeros and ones before training
            names.pop(value.tobytes(), None)  # so that the two are told once
            yield (
                f"not '{other}', which is 1 - '{name}': an exporter computed it, and "
                "they are trained separately"
            )


def describe_constants(roles: Roles) -> Iterator[tuple[str, str]]:
    """Yield a heading and a note for tensors that may be learned weights and are not trained."""
    reasons: dict[str, list[str]] = {}
    for name, reason in roles.constants.items():
        reasons.setdefault(reason, []).append(f"'{name}'")
    for reason, names in reasons.items():
        text = f"{list_some(names, '')}: {reason}; trainable=[*model.params, {names[0]}] trains it"
        yield "constant", text
    if unplaced := roles.unplaced:
        places = ", ".join(f"'{name}' (at {reader})" for name, reader in unplaced.items())
        names = ", ".join(map(repr, unplaced))
        yield (
            "learned?",
            f"{places}: not trained, because it is not at a weight input of an operator; "
            f"trainable=[*model.params, {names}] trains those that are learned",
        )


def float_arrays(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the floating-point constants of several numbers, which the program knows."""
    return {
        name: value
        for name, value in constants.items()
        if value.size > 1 and jnp.issubdtype(value.dtype, jnp.floating)
    }

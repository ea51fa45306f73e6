"""Tensors chosen by name, by regular expression or by a predicate; labels for groups of them."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxonnx.errors import InputError

Select = str | Iterable[str] | Callable[[str, jax.Array], bool]
"""Names or regular expressions (matched in full), or a predicate of name and value."""


def select(
    wanted: Select,
    tensors: Mapping[str, Any],
    what: str,
    by_name: Collection[str] = (),
    kind: str = "floating-point tensor of the model",
) -> set[str]:
    """Return the names of the chosen tensors.

    Args:
      wanted: the choice.
      tensors: the tensors to choose from, by name.
      what: the name of the argument, for errors.
      by_name: tensors that are chosen by their exact names only.
      kind: the noun for the tensors in errors.

    Raises:
      InputError: a name or expression matches nothing, or is not an expression.
    """
    open_to_all = tensors.keys() - by_name
    if callable(wanted):
        return {name for name in open_to_all if wanted(name, jnp.asarray(tensors[name]))}
    chosen = set()
    for one in [wanted] if isinstance(wanted, str) else wanted:
        try:
            matches = {name for name in open_to_all if re.fullmatch(one, name)}
        except re.error as error:
            if one not in tensors:
                raise InputError(f"{what}={one!r}: {error}") from error
            matches = set()
        matches |= {one} & tensors.keys()
        if not matches:
            near = difflib.get_close_matches(one, tensors, n=8) or sorted(tensors)
            raise InputError(
                f"{what}={one!r} matches no {kind}; there are "
                f"{', '.join(near[:40]) or 'none'}{', ...' if len(near) > 40 else ''}"
            )
        chosen |= matches
    return chosen


def labels(
    groups: Mapping[str, Select], default: str | None = None
) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """Return a function that labels parameters for `optax.multi_transform`: an optimizer per group.

    >>> import optax
    >>> from jaxonnx import demo, labels
    >>> optimizer = optax.multi_transform(
    ...     {"head": optax.adam(1e-3), "rest": optax.sgd(1e-4)},
    ...     labels({"head": "14.*"}, default="rest"),
    ... )
    >>> sorted({*labels({"head": ".*weight"}, default="rest")(demo.model().params).values()})
    ['head', 'rest']

    Args:
      groups: for each label the parameters that get it: names or regular expressions (matched in
        full), or a predicate of name and value. The first group that has a parameter counts.
      default: the label of all others.

    Returns:
      A function from parameters by name (of a model, or adapters) to labels by name.

    Raises:
      InputError: (by the function) a name or expression matches no parameter, or a parameter is in
        no group and there is no default.
    """

    def label(params: Mapping[str, Any]) -> dict[str, str]:
        chosen: dict[str, str] = {}
        for group, wanted in groups.items():
            for name in select(wanted, params, f"labels: {group}"):
                chosen.setdefault(name, group)
        missing = [name for name in params if name not in chosen]
        if missing and default is None:
            raise InputError(f"no group has {', '.join(missing)}; give them one, or a default")
        return {name: chosen.get(name) or str(default) for name in params}

    return label

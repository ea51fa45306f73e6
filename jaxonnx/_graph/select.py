"""Select tensors by name, regular expression, wildcard or predicate; label groups of them."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from onnx import GraphProto

from jaxonnx._graph.weight_names import Places
from jaxonnx._io.protos import modules
from jaxonnx._require import check_arguments
from jaxonnx.errors import InputError

Select = str | Iterable[str] | Callable[[str, jax.Array], bool]
"""Names, regular expressions (matched in full) or wildcards, or a predicate of name and value."""

_LISTED, _NEAR = 40, 6
"""Names in an error: of tensors where nothing is near, and of each kind where something is."""

_NOTHING = re.compile(r"(?!)")
"""Matches no text."""

_EXPRESSION = r"()[]{}\|+^$"
"""Characters of regular expressions that neither names of tensors nor wildcards have."""


class HasPlaces(Protocol):
    """A model, as far as `labels` needs it: it knows the names that its weights go by."""

    @property
    def _places(self) -> Places: ...


def select(
    choice: Select,
    tensors: Mapping[str, Any],
    what: str,
    by_name: Collection[str] = (),
    kind: str = "floating-point tensor of the model",
    places: Places | None = None,
) -> set[str]:
    """Return the names of the chosen tensors.

    Args:
      choice: the choice.
      tensors: the tensors to choose from, by name.
      what: the name of the argument, for errors.
      by_name: tensors that are chosen by their exact names only.
      kind: the noun for the tensors in errors.
      places: the modules, nodes and ties that choose tensors as well.

    Raises:
      InputError: a name or expression matches nothing, or is not an expression.
    """
    if callable(choice):
        open_to_all = tensors.keys() - by_name
        return {name for name in open_to_all if choice(name, jnp.asarray(tensors[name]))}
    if not np.iterable(choice):
        raise InputError(f"{what} takes names or a predicate, not {choice!r}")
    chosen = set()
    for selection in [choice] if isinstance(choice, str) else choice:
        if not isinstance(selection, str | re.Pattern):
            raise InputError(f"{what} takes names or a predicate, not {selection!r}")
        matches = matching(selection, tensors, by_name, places)
        if not matches:
            meant = _error(selection) and {*selection} & {*_EXPRESSION}
            error = f" (no regular expression: {_error(selection)})" if meant else ""
            hint = near(selection, tensors, places)
            raise InputError(f"{what}={selection!r} matches no {kind}{error}; {hint}")
        chosen |= matches
    return chosen


def matching(
    selection: str,
    tensors: Mapping[str, Any],
    by_name: Collection[str] = (),
    places: Places | None = None,
) -> set[str]:
    """Return the tensors that a name or an expression matches.

    These are tried in order, and the first that matches any tensor counts: the name or alias of a
    tensor, literally or as a regular expression; the name of a module, node or tie, literally; the
    same as a regular expression; any of these with wildcards.
    """
    open_to_all = tensors.keys() - by_name
    if places is not None and selection not in tensors and selection in places.ties:
        return {places.ties[selection]} & tensors.keys()
    expression = _NOTHING if _error(selection) else re.compile(selection)
    aliases = {} if places is None else places.aliases
    called = {name: (name, aliases.get(name, name)) for name in open_to_all}
    fully = {name for name, names in called.items() if any(map(expression.fullmatch, names))}
    fully |= {name for name in tensors if selection in (name, aliases.get(name))}
    if fully:
        return fully
    groups: list[tuple[str, Collection[str]]] = []  # modules, nodes and ties, with their tensors
    if places is not None:
        groups += [*places.modules.items(), *places.nodes.items()]
        groups += [(name, (of,)) for name, of in places.ties.items()]
    exact = {tensor for name, names in groups if name == selection for tensor in names}
    if exact & open_to_all:
        return exact & open_to_all
    like = {tensor for name, names in groups if expression.fullmatch(name) for tensor in names}
    if like & open_to_all:
        return like & open_to_all
    if not selection.strip("*?"):
        return set()  # "*" is likely a mistake: all tensors are None or ".*"
    fits = re.compile(fnmatch.translate(selection)).fullmatch
    within = {name for name, names in called.items() if any(map(fits, names))}
    for name, names in groups:
        # a tensor counts by its module, too: "*.query.*" is all tensors of modules named query
        within.update(n for n in names if fits(name) or fits(f"{name}.{n}"))
    return within & open_to_all


def near(pattern: str, tensors: Collection[str], places: Places | None) -> str:
    """Return similar names of tensors, modules and nodes, or else all names, for an error."""
    core = pattern.strip(".*?^$/") or pattern
    lists: dict[str, Collection[str]] = {"tensors": tensors}
    if places is not None:
        names = [places.aliases.get(name, name) for name in tensors]
        lists = {"tensors": names, "modules": places.modules, "nodes": places.nodes}
    parts = []
    for kind, names in lists.items():
        if close := _like(core, names):
            parts.append(f"{kind} {', '.join(close)}")
    if parts:
        return f"near it are {'; '.join(parts)}"
    listed = sorted(tensors)
    more = ", ..." if len(listed) > _LISTED else ""
    return f"there are {', '.join(listed[:_LISTED]) or 'none'}{more}"


def _like(text: str, names: Iterable[str]) -> list[str]:
    """Return a few names that resemble `text` as a whole or in a part, or contain it."""
    parts: dict[str, list[str]] = {}
    for name in names:
        for part in dict.fromkeys([name, *re.split(r"[./:]", name)]):
            parts.setdefault(part, []).append(name)
    close = [name for part in difflib.get_close_matches(text, parts) for name in parts[part]]
    close += [name for name in names if text in name]
    return [*dict.fromkeys(close)][:_NEAR]


def _error(text: str) -> str:
    """Describe the error in a regular expression; "" without one."""
    try:
        re.compile(text)
    except re.error as error:
        return str(error)
    return ""


def labels(
    groups: Mapping[str, Select], default: str | None = None, *, model: HasPlaces | None = None
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
      groups: for each label the parameters that get it: names, regular expressions (matched in
        full) or wildcards, or a predicate of name and value. The first group that has a parameter
        counts.
      default: the label of all others.
      model: whose modules and nodes the groups may name too, as in `Model.with_trainable`.

    Returns:
      A function from parameters by name (of a model, or adapters) to labels by name.

    Raises:
      InputError: (by the function) a name or expression matches no parameter, or a parameter is in
        no group and there is no default.
    """

    check_arguments(labels, locals())

    def label(params: Mapping[str, Any]) -> dict[str, str]:
        chosen: dict[str, str] = {}
        places = None if model is None else model._places
        for group, choice in groups.items():
            for name in select(choice, params, f"labels: {group}", places=places):
                chosen.setdefault(name, group)
        missing = [name for name in params if name not in chosen]
        if missing and default is None:
            raise InputError(f"no group has {', '.join(missing)}; give them one, or a default")
        return {name: chosen.get(name) or str(default) for name in params}

    return label


# Modules that exporters record for the nodes of a graph, and the lookup of values by name.


def resolve(graph: GraphProto, name: str) -> str:
    """Return the value that a name stands for: of a value, a node or a PyTorch module.

    A node stands for its first output, a module for the first output of its last node.

    Raises:
      InputError: an unknown name; the message suggests similar ones.
    """
    values = [output for node in graph.node for output in node.output if output]
    if name in values:
        return name
    for node in graph.node:
        if name == node.name:
            return node.output[0]
    for node in reversed(graph.node):
        if name in modules(node):
            return node.output[0]
    scopes = dict.fromkeys(scope for node in graph.node for scope in modules(node))
    candidates = [*scopes, *values]
    near = difflib.get_close_matches(str(name), candidates, n=5)
    near += [other for other in candidates if str(name) in other and other not in near][-5:]
    raise InputError(
        f"the graph has no value, node or module '{name}'; "
        + (f"near it are {', '.join(near)}" if near else f"it ends with {', '.join(values[-5:])}")
    )

"""The tensors of a checkpoint of transformers, as rows of a file's tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from jaxonnx._graph.uses import Weight, find_tied, uses_by_tensor
from jaxonnx._graph.weight_names import is_numbered
from jaxonnx._rewrite.network import Network
from jaxonnx.errors import InputError
from jaxonnx.llm._module_names import (
    EXPORTED,
    FAMILIES,
    LIKE_LLAMA,
    Block,
    find_blocks,
    find_matrices,
    find_vectors,
)

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
_OTHER_FORMS = {"gptoss": "experts", "olmo": "norms"}
"""Model types, and their weights that files have in another form than transformers."""
_ROTATE = ("GroupQueryAttention", "RotaryEmbedding")
"""Operators whose tensors without a role are tables of positions, which transformers computes."""


def name_weights(
    model: Network, meanings: Mapping[str, Weight], family: str, names: Mapping[str, str]
) -> dict[str, list[Block]]:
    """Name the weights of a model as transformers does.

    Args:
      model: the model.
      meanings: the meaning of its tensors (`weights`).
      family: its model type (`find_family`).
      names: the names in transformers of some tensors, which go before others.

    Returns:
      By the name in transformers, the rows of tensors (sources) that make the tensor; 0 rows are
      all.

    Raises:
      InputError: the name of a tensor in transformers is not known, or two have the same; the file
        has adapters as nodes.
    """
    learned = _list_weights(model, meanings)
    if factors := sorted(n for n in learned if n in model._factors or ".lora_A" in n):
        raise InputError(
            f"the file has adapters as nodes ('{factors[0]}'), which a checkpoint has not: "
            "save it with adapters='merged', or export the model that they were trained for"
        )
    if not names and family in _OTHER_FORMS:
        raise InputError(
            f"the {_OTHER_FORMS[family]} of model type '{family}' have another form in transformers"
        )
    if not (names or family in (*LIKE_LLAMA, *FAMILIES)) and any(map(EXPORTED.search, learned)):
        warnings.warn(
            f"the names of modules are not known for the model type '{family}': they are written "
            "as those of Llama; compare with the keys that transformers reports as missing",
            stacklevel=3,
        )
    modules, rows, packed = find_matrices(model, None)
    parts: dict[str, list[Block]] = {}
    for block in find_blocks(modules, rows, packed, family):
        parts.setdefault(block.source, []).append(block)
    tied = {*find_tied(model.graph, model.tensors)}
    vectors = find_vectors(learned, model.aliases, modules, parts, family)
    result: dict[str, list[Block]] = {}
    for name in learned:
        if ".rotary_emb." in model.aliases.get(name, name):
            continue  # frequencies, which transformers computes
        targets = vectors[name]
        if name in names:
            targets = [Block(name, 0, names[name], 0, 0)]
        elif name in parts and not targets[0].target.endswith(".bias"):
            whole = {"rows": 0} if len(parts[name]) == 1 else {}
            targets = [b._replace(target=f"{b.target}.weight", **whole) for b in parts[name]]
        elif not targets[0].rows:
            _check_name(name, meanings[name], targets[0].target, names)
        pieces = {block.target: block for block in targets}
        if name in tied and HEAD in pieces:
            pieces = {TABLE: pieces[HEAD]}
        for key, block in pieces.items():
            others = result.setdefault(key, [])
            if any(other.start == block.start for other in others):
                raise InputError(
                    f"'{others[0].source}' and '{name}' would both be '{key}' in transformers: "
                    "pass names= for one of them"
                )
            others.append(block)
    return result


def _list_weights(model: Network, meanings: Mapping[str, Weight]) -> list[str]:
    """List the tensors that are learned, without scales and zero points."""
    roles, read = model._places.roles, uses_by_tensor(model.graph, model.tensors)
    stored = [name for name, weight in meanings.items() if weight.storage]
    parts = {part for name in stored for use in read[name] for part in use.parts}
    looks = {name for name, reader in roles.unplaced.items() if reader not in _ROTATE}
    trained = model.params.keys() & read.keys()  # factors of adapters are not read as such
    chosen = {*stored, *roles.of, *looks, *trained} - parts
    return [name for name in model.tensors if name in chosen]


def _check_name(name: str, meaning: Weight, key: str, names: Mapping[str, str]) -> None:
    """Raise an InputError if a name that is that of the file says nothing to transformers."""
    unusable = is_numbered(key) or meaning.storage or EXPORTED.search(name)
    if unusable and name not in names:
        raise InputError(
            f"the name of '{name}' {[*meaning.shape]} in transformers is not known: pass "
            f"names={{'{name}': ...}}"
        )

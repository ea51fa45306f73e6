"""The tensors of a checkpoint of transformers, as rows of a file's tensors."""

from __future__ import annotations

import re
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
)

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
_NAMES = (
    (r"^(model\.layers\.\d+)\.attn\.", r"\1.self_attn."),
    (r"\.layers\.\d+\.final_norm_layernorm\.", ".norm."),
    (r"_norm\.layernorm\.", "_norm."),
    (r"\.Add\.bias$", ".bias"),
)
"""Parts of the builder's names of vectors, and those of transformers."""
_NAMES_OF = {
    "phi": ((r"\.norm\.", ".final_layernorm."),),
    "lfm2": (
        (r"\.norm\.", ".embedding_norm."),
        (r"\.(operator|ffn)_layernorm\.", r".\1_norm."),
        (r"\.([qk])_norm\.", r".\1_layernorm."),
    ),
}
"""By model type, more of them."""
_OTHER_FORMS = {"gptoss": "experts", "olmo": "norms"}
"""Model types, and their weights that files have in another form than transformers."""
_OFFSETS = ("gemma", "gemma2", "gemma3", "gemma3text", "nemotron")
"""Model types whose norms multiply by 1 + weight."""
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
    matrix_of = {blocks[0].target: weight for weight, blocks in parts.items()}
    matrix_of |= {module: weight for weight, module in modules.items()}
    result: dict[str, list[Block]] = {}
    for name in learned:
        if ".rotary_emb." in model.aliases.get(name, name):
            continue  # frequencies, which transformers computes
        key = names.get(name) or _rename(model.aliases.get(name, name), family)
        module = re.fullmatch(r"(.*?)\.bias(__.*)?", key)  # mobius joins the names of biases
        vector = module and parts.get(matrix_of.get(module[1], ""))
        if name in names or not (vector or name in parts):
            _check_name(name, meanings[name], key, names)
            pieces = {key: Block(name, 0, key, 0, 0)}
        else:
            end, blocks = ".bias" if vector else ".weight", vector or parts[name]
            whole = {"rows": 0} if len(blocks) == 1 else {}
            pieces = {b.target + end: b._replace(source=name, **whole) for b in blocks}
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


def scales_from_one(key: str, family: str) -> bool:
    """Check whether a norm of transformers multiplies by 1 + weight."""
    return key.endswith("norm.weight") and family in _OFFSETS


def _list_weights(model: Network, meanings: Mapping[str, Weight]) -> list[str]:
    """List the tensors that are learned, without scales and zero points."""
    roles, read = model._places.roles, uses_by_tensor(model.graph, model.tensors)
    stored = [name for name, weight in meanings.items() if weight.storage]
    parts = {part for name in stored for use in read[name] for part in use.parts}
    looks = {name for name, reader in roles.unplaced.items() if reader not in _ROTATE}
    trained = model.params.keys() & read.keys()  # factors of adapters are not read as such
    chosen = {*stored, *roles.of, *looks, *trained} - parts
    return [name for name in model.tensors if name in chosen]


def _rename(name: str, family: str) -> str:
    for pattern, new in (*_NAMES, *_NAMES_OF.get(family, ())):
        name = re.sub(pattern, new, name)
    return name


def _check_name(name: str, meaning: Weight, key: str, names: Mapping[str, str]) -> None:
    """Raise an InputError if a name that is that of the file says nothing to transformers."""
    unusable = is_numbered(key) or meaning.storage or EXPORTED.search(name)
    if unusable and name not in names:
        raise InputError(
            f"the name of '{name}' {[*meaning.shape]} in transformers is not known: pass "
            f"names={{'{name}': ...}}"
        )

"""The modules that PEFT names, and the rows of a file's weights that are theirs.

Exporters rename, join and split the matrices of a transformer: onnxruntime-genai's builder has
`attn.qkv_proj` for the `self_attn.q_proj`, `k_proj` and `v_proj` of most families, and `gate_proj`
and `up_proj` for the `gate_up_proj` of Phi-3. Both directions, files to PEFT and back, read one
list of blocks.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import Use, Weight, uses, weights
from jaxonnx._graph.weight_names import is_numbered
from jaxonnx.errors import InputError
from jaxonnx.lora import _files as files
from jaxonnx.lora._files import Change
from jaxonnx.lora._merge import is_float, magnitude, pair
from jaxonnx.lora._nodes import module_name
from jaxonnx.model import Model

_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OTHERS = (
    ("phi", "self_attn.dense", ("self_attn.o_proj",)),
    ("phi", "mlp.fc1", ("mlp.up_proj",)),
    ("phi", "mlp.fc2", ("mlp.down_proj",)),
    ("phi3", "self_attn.qkv_proj", _ATTENTION),
    ("phi3", "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ("lfm2", "self_attn.out_proj", ("self_attn.o_proj",)),
    ("lfm2", "feed_forward.w1", ("mlp.gate_proj",)),
    ("lfm2", "feed_forward.w2", ("mlp.down_proj",)),
    ("lfm2", "feed_forward.w3", ("mlp.up_proj",)),
)
"""By model type, modules of transformers, and those of Llama whose rows they have."""
_FAMILIES = tuple(dict.fromkeys(family for family, *_ in _OTHERS))
_LIKE_LLAMA = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3text", "gptoss"),
    *("smollm3", "granite", "olmo", "olmo2", "nemotron", "ernie45", "hunyuandensev1", "causallm"),
)
"""Model types whose modules are named as those of Llama; mobius has a CausalLMModel for many."""
_EXPORTED = re.compile(r"\.MatMul\.|_t$")
"""Weights that onnxruntime-genai's builder and mobius name."""


class Block(NamedTuple):
    """Rows of a matrix that are rows of another one."""

    source: str
    first: int
    target: str
    start: int
    rows: int

    def invert(self) -> Block:
        """Exchange source and target."""
        return Block(self.target, self.start, self.source, self.first, self.rows)


def name_module(weight: str, aliases: Mapping[str, str]) -> str:
    """Return the module of a weight as transformers names it, where the file does not pack it.

    >>> name_module("model.layers.0.attn.o_proj.MatMul.weight_Q4", {})
    'model.layers.0.self_attn.o_proj'
    """
    name = module_name(aliases.get(weight, weight))
    return re.sub(r"^(model\.layers\.\d+)\.attn\.", r"\1.self_attn.", name)


def find_family(model: Model) -> str:
    """Return the model type, in lower case without underscores; empty if the file tells none.

    Folders have it in `genai_config.json` or `config.json`, mobius records the class of the model.
    """
    read = model.folder.read_json if model.folder else lambda name: {}
    family = read("genai_config.json").get("model", {}).get("type")
    family = family or read("config.json").get("model_type")
    records = (entry for node in model.proto.graph.node for entry in node.metadata_props)
    classes = (e.value for e in records if e.key == "pkg.onnxscript.class_hierarchy")
    recorded = re.match(r"\['(\w+?)(?:CausalLM)?Model'", next(classes, ""))
    family = family or (recorded[1] if recorded else "")
    return re.sub(r"[^a-z0-9]", "", str(family).lower())


def choose_blocks(
    model: Model | None, names: Callable[[str], str] | None, rows: Mapping[str, int]
) -> list[Block]:
    """Return the blocks of adapted weights (sources) in modules of PEFT (targets).

    Args:
      model: the model of the weights; without it each weight is a module.
      names: the module of a weight; by default that of transformers.
      rows: the outputs of each adapted weight.

    Raises:
      InputError: the module of a weight is not known.
    """
    if model is None:
        modules, heights, packed, family = _name_modules(rows, names, {}), rows, None, ""
        packs = [w for w, module in modules.items() if len(_split_name(w, module)) > 1]
        if packs and names is None:
            raise InputError(
                f"'{packs[0]}' is one matrix for several modules in transformers: pass the model "
                "as well, save(path, model)"
            )
    else:
        modules, heights, packed = _find_matrices(model, names)
        family = find_family(model)
    blocks = find_blocks(modules, heights, packed, family)
    for weight, height in rows.items():
        if sum(block.rows for block in blocks if block.source == weight) != height:
            raise InputError(
                f"the module of '{weight}' in transformers is not known: pass names=, a function "
                "from the name of a weight to that of its module, or save an .npz"
            )
    if not (names or family in (*_LIKE_LLAMA, *_FAMILIES)) and any(map(_EXPORTED.search, rows)):
        example = next(block.target for block in blocks if block.source in rows)
        kind = f"model type '{family}'" if family else "model type, which the file does not tell"
        warnings.warn(
            f"the names of modules are not known for this {kind}: they are written as those of "
            f"Llama ('{example}'), and PEFT ignores what it does not find. Load the folder with "
            "genai_config.json, or compare with named_modules() and pass names=",
            stacklevel=4,
        )
    return blocks


def read(
    path: str | os.PathLike, model: Model, names: Callable[[str], str] | None
) -> tuple[dict[str, np.ndarray], int, float, str]:
    """Return the factors of a model's weights from an adapter file, the largest rank, alpha, base.

    The factors are called as in `Adapters.values`.

    Args:
      path: an .onnx_adapter or a folder of PEFT.
      model: the model of the weights.
      names: the module of a weight, beside the names in transformers.

    Raises:
      InputError: a module without a weight, or what is not LoRA.
      ModelError: the file is damaged.
    """
    modules, rows, packed = _find_matrices(model, names)
    places: dict[str, list[Block]] = {}
    layouts = [
        *(find_blocks(modules, rows, packed, key) for key in (find_family(model), "", *_FAMILIES)),
        find_blocks({name: (names or module_name)(name) for name in rows}, rows, None, ""),
    ]
    for blocks in layouts:
        targets: dict[str, list[Block]] = {}
        for block in blocks:
            module = files.plain_name(block.target)
            targets.setdefault(module, []).append(block._replace(target=module).invert())
        places = targets | places
    changes, scales = files.read(path, places)
    scale = next(iter(scales.values()))
    if len({*scales.values()}) > 1:  # B has them
        changes = {name: (a, scales[name] * b, m) for name, (a, b, m) in changes.items()}
        scale = 1.0
    moved = move_rows(changes, [block for name in changes for block in places[name]], rows)
    rank = max((a.shape[-2] for a, *_ in moved.values()), default=0)
    named = {
        member: value
        for weight, change in moved.items()
        for member, value in zip((*pair(weight), magnitude(weight)), change, strict=True)
        if value is not None
    }
    return named, rank, rank * scale, files.read_base(path)


def _find_matrices(
    model: Model, names: Callable[[str], str] | None
) -> tuple[dict[str, str], dict[str, int], dict[str, tuple[int, ...]]]:
    """Return the modules of weights that can be adapted, their outputs, and those of parts."""
    tensors = model.tensors
    meanings = weights(model.graph, tensors)
    rows = {
        name: weight.matrix.sizes(weight.shape)[0]
        for name, weight in meanings.items()
        if weight.matrix and (is_float(tensors[name]) or weight.storage)
    }
    used = [*uses(model.graph, tensors)]
    packed = find_packed_projections(model.graph, meanings, used, tensors)
    return _name_modules(rows, names, model.aliases), rows, packed


def _name_modules(
    weights: Collection[str], names: Callable[[str], str] | None, aliases: Mapping[str, str]
) -> dict[str, str]:
    """Return the module of each weight, without those that have only a number."""
    if names is not None:
        return {name: names(name) for name in weights}
    named = [name for name in weights if name in aliases or not is_numbered(name)]
    return {name: name_module(name, aliases) for name in named}


def find_blocks(
    modules: Mapping[str, str],
    rows: Mapping[str, int],
    packed: Mapping[str, Sequence[int]] | None,
    family: str,
) -> list[Block]:
    """Return the rows of weights (sources) that are rows of modules (targets).

    Args:
      modules: the module of each weight.
      rows: the outputs of each weight.
      packed: the outputs of each part of weights that pack several modules; None: none does.
      family: the model type.
    """
    parts: dict[str, list[tuple[str, int, int]]] = {}
    for weight, module in modules.items():
        names = [module] if packed is None else _split_name(weight, module)
        sizes = [rows[weight]] if len(names) == 1 else (packed or {}).get(weight, ())
        first = 0
        for name, size in zip(names, sizes, strict=False):
            parts.setdefault(name, []).append((weight, first, size))
            first += size
    # weights with the name of one module cannot be told apart: they have none
    parts = {name: pieces for name, pieces in parts.items() if len(pieces) == 1}
    for _, end, ends in (entry for entry in _OTHERS if entry[0] == family):
        for stem in [name.removesuffix(ends[0]) for name in parts if name.endswith(ends[0])]:
            members = [stem + member for member in ends]
            if parts.keys() >= {*members}:
                pieces = [piece for name in members for piece in parts.pop(name)]
                if len({weight for weight, *_ in pieces}) == 1:  # packed in the file as well
                    pieces = [(*pieces[0][:2], sum(size for *_, size in pieces))]
                parts[stem + end] = pieces
    blocks = []
    for module, pieces in parts.items():
        start = 0
        for weight, first, size in pieces:
            blocks.append(Block(weight, first, module, start, size))
            start += size
    return blocks


def _split_name(weight: str, module: str) -> list[str]:
    """Return the modules that exporters pack into one weight, or its only module."""
    first, *others = module.split(".weight__")  # mobius joins the names of weights
    stem, _, end = first.rpartition(".")
    if others:
        return [first, *others]
    # the builder's; torch.onnx and mobius write the gate_up_proj of Phi-3 itself
    packs = ".MatMul." in weight and end in _PACKED
    return [f"{stem}.{part}" for part in _PACKED[end]] if packs else [module]


def move_rows(
    changes: Mapping[str, Change], blocks: Sequence[Block], heights: Mapping[str, int]
) -> dict[str, Change]:
    """Return the changes of targets, of those of sources.

    The ranks of several sources stand beside each other, and a part of a source has only those that
    reach its rows. A target that nothing changes is left out.

    Args:
      changes: A (rank, inputs), B (outputs, rank) and the norms of the outputs, by source.
      blocks: the rows of sources that are rows of targets.
      heights: the number of rows of each target.

    Raises:
      InputError: a source has other outputs, or norms (DoRA) for some rows of a target only.
    """
    outputs: dict[str, int] = {}
    arriving: dict[str, list[Block]] = {}
    for block in blocks:
        outputs[block.source] = outputs.get(block.source, 0) + block.rows
        if block.source in changes:
            arriving.setdefault(block.target, []).append(block)
    result: dict[str, Change] = {}
    for target, parts in arriving.items():
        pieces = []
        for source, first, _, start, rows in sorted(parts, key=lambda block: block.start):
            a, b, norms = changes[source]
            if b.ndim == 2 and len(b) != outputs[source]:
                raise InputError(
                    f"the adapters are of another model: {source.rpartition('.')[2]} has "
                    f"{outputs[source]} outputs in this one, {len(b)} in the adapters"
                )
            if (rows, len(parts)) == (outputs[source], 1) and rows == heights[target]:
                result[target] = a, b, norms
                break
            cut = b[first : first + rows]
            used = cut.any(axis=0) | (not b.any())
            used[0] |= norms is not None and not used.any()
            whole = np.zeros((heights[target], used.sum()), np.float32)
            whole[start : start + rows] = cut[:, used]
            pieces.append((a[used], whole, None if norms is None else norms[first : first + rows]))
        else:
            a, b, norms = zip(*pieces, strict=True)
            scaled = [x for x in norms if x is not None]
            if scaled and sum(map(len, scaled)) < heights[target]:
                raise InputError(
                    f"magnitudes are given for some rows of '{target}' only, which is one matrix: "
                    "give adapters with magnitudes of all its parts"
                )
            if sum(map(len, a)):
                joined = np.concatenate(scaled) if scaled else None
                result[target] = np.concatenate(a), np.concatenate(b, axis=1), joined
    return result


# Find matrices that have the outputs of several projections: queries, keys and values, say.


def find_packed_projections(
    graph: Graph, meanings: Mapping[str, Weight], used: Collection[Use], tensors: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Find matrices whose outputs a GroupQueryAttention or a Split takes apart.

    Args:
      graph: the bound graph.
      meanings: the meaning of its tensors (`weights`).
      used: their uses.
      tensors: their values.

    Returns:
      The numbers of outputs for each part (queries, keys and values, in this order, of an
      attention), by the name of the matrix.
    """
    result = {}
    for use in used:
        place = meanings[use.name].matrix
        if place is None or use.passes or use.node is not use.outer:
            continue
        rows, _ = place.sizes(meanings[use.name].shape)
        values: list[str] = [use.node.outputs[0]]
        while values and use.name not in result:
            for node in graph.readers.get(values.pop(), ()):
                if node.op.name in ("Add", "Cast", "Identity"):
                    values.append(node.outputs[0])
                if sizes := _part_sizes(node, rows, tensors):
                    result[use.name] = sizes
    return result


def _part_sizes(node: Node, rows: int, tensors: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of outputs that a node takes apart; empty if it takes none apart."""
    if node.op.name == "GroupQueryAttention" and not any(node.inputs[1:3]):
        # packed outputs: count heads of queries, then shared heads of keys and of values each
        count, shared = (node.attributes[key] for key in ("num_heads", "kv_num_heads"))
        size = rows // (count + 2 * shared)
        return count * size, shared * size, shared * size
    if node.op.name == "Split" and node.attributes.get("axis", 0) in (-1, 2):
        sizes = tensors.get(node.inputs[1]) if len(node.inputs) > 1 else None
        equal = [rows // len(node.outputs)] * len(node.outputs)
        parts = (*(equal if sizes is None else np.asarray(sizes).tolist()),)
        return parts if sum(parts) == rows else ()
    return ()

"""Names of modules and tensors in transformers, and the rows of a file's tensors that are theirs.

Exporters rename, join and split the matrices of a transformer: onnxruntime-genai's builder has
`attn.qkv_proj` for the `self_attn.q_proj`, `k_proj` and `v_proj` of most families, and `gate_proj`
and `up_proj` for the `gate_up_proj` of Phi-3. Files to PEFT and back, and to checkpoints of
transformers, read one list of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxonnx._graph.bind import Graph, Node
from jaxonnx._graph.uses import Use, Weight, find_tied, uses, uses_by_tensor, weights
from jaxonnx._graph.weight_names import is_numbered, module_name
from jaxonnx._rewrite.network import Network
from jaxonnx._weights import is_float
from jaxonnx.errors import InputError, warn

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
FAMILIES = tuple(dict.fromkeys(family for family, *_ in _OTHERS))
LIKE_LLAMA = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3text", "gptoss"),
    *("smollm3", "granite", "olmo", "olmo2", "nemotron", "ernie45", "hunyuandensev1", "causallm"),
)
"""Model types whose modules are named as those of Llama; mobius has a CausalLMModel for many."""
_VECTORS = (
    (r"^(model\.layers\.\d+)\.attn\.", r"\1.self_attn."),
    (r"\.layers\.\d+\.final_norm_layernorm\.", ".norm."),
    (r"_norm\.layernorm\.", "_norm."),
    (r"\.Add\.bias$", ".bias"),
)
"""Parts of the builder's names of vectors, and those of transformers."""
_VECTORS_OF = {
    "phi": ((r"\.norm\.", ".final_layernorm."),),
    "lfm2": (
        (r"\.norm\.", ".embedding_norm."),
        (r"\.(operator|ffn)_layernorm\.", r".\1_norm."),
        (r"\.([qk])_norm\.", r".\1_layernorm."),
    ),
}
"""By model type, more of them."""
_OFFSETS = ("gemma", "gemma2", "gemma3", "gemma3text", "nemotron")
"""Model types whose norms multiply by 1 + weight."""
HEAD, TABLE = "lm_head", "model.embed_tokens"
"""The modules of the output layer and of the embedding."""
BESIDE_VISION = "model.language_model."
"""Where transformers has the modules of a decoder's "model" beside a vision encoder."""
_DECODERS = {
    "gemma3vl": "gemma3",
    "lfm2vl": "lfm2",
    "mistral3": "mistral",
    "qwen25vl": "qwen2",
    "qwen3vl": "qwen3",
}
"""By model types with a vision encoder, that of the decoder, which a file may have alone."""
EXPORTED = re.compile(r"\.MatMul\.|_t$")
"""Weights that onnxruntime-genai's builder and mobius name."""
_WRAPPER = re.compile(
    r"((?:\w+\.)*?)model\.(?:language_model\.|encoder\.|decoder\.)?(?:layers\.\d|embed_tokens\b)"
    r"|((?:_orig_mod\.)+)"
)
"""What precedes "model.layers.0" of a network in transformers, or the prefix of torch.compile."""
_PARTS = ("language_model", "text_model", "decoder", "depth_decoder", "speech_decoder_model")
_PARTS += ("thinker", "talker", "code_predictor")
"""Parts of models of transformers that are such networks."""


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


def name_module(weight: str, aliases: Mapping[str, str], wrapper: str = "") -> str:
    """Return the module of a weight as transformers names it, where the file does not pack it.

    Args:
      weight: its name in the file.
      aliases: the names of weights besides their own.
      wrapper: the prefix to leave out (`find_wrapper`).

    >>> name_module("model.layers.0.attn.o_proj.MatMul.weight_Q4", {})
    'model.layers.0.self_attn.o_proj'
    """
    name = module_name(aliases.get(weight, weight)).removeprefix(wrapper)
    return re.sub(r"^(model\.layers\.\d+)\.attn\.", r"\1.self_attn.", name)


def find_family(model: Network, config: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the model type, in lower case without underscores; empty if the file tells none.

    Folders have it in `genai_config.json` or `config.json`, mobius records the class of the model.
    Of a vision-language model it is that of the decoder.

    Args:
      model: the model.
      config: a `config.json` of another folder.
    """
    family = _read_model_type(model, config)
    return _DECODERS.get(family.removesuffix("text"), family)


def _read_model_type(model: Network, config: Mapping[str, Any] = MappingProxyType({})) -> str:
    read_json = model.folder.read_json if model.folder else lambda name: {}
    family = read_json("genai_config.json").get("model", {}).get("type")
    settings = {**config, **read_json("config.json")}
    if model.folder and model.folder.image_token is not None:
        settings = settings.get("text_config") or settings
    family = family or settings.get("model_type")
    records = (entry for node in model.proto.graph.node for entry in node.metadata_props)
    classes = (e.value for e in records if e.key == "pkg.onnxscript.class_hierarchy")
    recorded = re.match(r"\['(\w+?)(?:CausalLM)?Model'", next(classes, ""))
    family = family or (recorded[1] if recorded else "")
    return re.sub(r"[^a-z0-9]", "", str(family).lower())


def is_beside_vision(model: Network) -> bool:
    """Check whether a model is, or has, the decoder of a vision-language model of transformers."""
    has_images = model.folder is not None and model.folder.image_token is not None
    return has_images or _read_model_type(model).removesuffix("text") in _DECODERS


def torch_axes(model: Network, name: str, weight: Weight) -> tuple[int, ...]:
    """Return the axes of a weight of the file in the order of transformers' tensor.

    Its matrices have a row for each output, its tables one for each input.
    """
    place, rank = weight.matrix, len(weight.shape)
    renamed = EXPORTED.search(name) or name in model.aliases or weight.storage
    if not renamed or place is None or rank != 2:
        return (*range(rank),)
    return (place.input, place.output) if place.lookup else (place.output, place.input)


def find_matrices(
    model: Network, names: Callable[[str], str] | None
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
    fused = find_fused_projections(model.graph, meanings, used, tensors)
    modules = name_modules(rows, names, model.aliases)
    return modules, rows, fused


def name_modules(
    weights: Collection[str], names: Callable[[str], str] | None, aliases: Mapping[str, str]
) -> dict[str, str]:
    """Return the module of each weight, without those that have only a number."""
    if names is not None:
        return {name: names(name) for name in weights}
    named = [name for name in weights if name in aliases or not is_numbered(name)]
    wrapper = find_wrapper(named, aliases)
    return {name: name_module(name, aliases, wrapper) for name in named}


def find_wrapper(weights: Collection[str], aliases: Mapping[str, str]) -> str:
    """Return the prefix that a module around the network gives to all others, if it is certain.

    In transformers, `lm_head` and "model.layers" have no prefix but that of a part of a model.

    >>> find_wrapper(["net.model.layers.0.mlp.up_proj.weight", "net.lm_head.weight"], {})
    'net.'
    """
    modules = [module_name(aliases.get(weight, weight)) for weight in weights]
    heads = [module.removesuffix(HEAD) for module in modules if module.endswith(f".{HEAD}")]
    matches = (_WRAPPER.match(module) for module in modules)
    wrappers = {*heads} or {match[1] or match[2] or "" for match in matches if match}
    wrapper = wrappers.pop() if len(wrappers) == 1 else ""
    return wrapper if {*wrapper.split(".")}.isdisjoint(_PARTS) else ""


def find_blocks(
    modules: Mapping[str, str],
    rows: Mapping[str, int],
    fused: Mapping[str, Sequence[int]] | None,
    family: str,
) -> list[Block]:
    """Return the rows of weights (sources) that are rows of modules (targets).

    Args:
      modules: the module of each weight.
      rows: the outputs of each weight.
      fused: the outputs of each part of weights that fuse several modules; None: none does.
      family: the model type.
    """
    parts: dict[str, list[tuple[str, int, int]]] = {}
    for weight, module in modules.items():
        names = [module] if fused is None else split_name(weight, module)
        sizes = [rows[weight]] if len(names) == 1 else (fused or {}).get(weight, ())
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
                if len({weight for weight, *_ in pieces}) == 1:  # fused in the file as well
                    pieces = [(*pieces[0][:2], sum(size for *_, size in pieces))]
                parts[stem + end] = pieces
    blocks = []
    for module, pieces in parts.items():
        start = 0
        for weight, first, size in pieces:
            blocks.append(Block(weight, first, module, start, size))
            start += size
    return blocks


def find_vectors(
    vectors: Collection[str],
    aliases: Mapping[str, str],
    modules: Mapping[str, str],
    parts: Mapping[str, Sequence[Block]],
    family: str,
    wrapper: str,
) -> dict[str, list[Block]]:
    """Find the entries of vectors (sources) that are those of transformers' (targets).

    A bias of a matrix that exporters pack has a part for each module. A target ends in ".weight"
    or ".bias".

    Args:
      vectors: biases and norms of the file.
      aliases: the names of tensors in transformers, as far as the file tells.
      modules: the module of each matrix.
      parts: by matrix, its rows in modules (`find_blocks`).
      family: the model type.
      wrapper: the prefix to leave out of their names (`find_wrapper`).

    Returns:
      Blocks by vector; 0 rows are all.
    """
    matrix_of = {blocks[0].target: matrix for matrix, blocks in parts.items()}
    for matrix, module in modules.items():
        matrix_of |= {name_module(matrix, aliases): matrix, module: matrix}
    result = {}
    for name in vectors:
        target = aliases.get(name, name).removeprefix(wrapper)
        for pattern, new in (*_VECTORS, *_VECTORS_OF.get(family, ())):
            target = re.sub(pattern, new, target)
        bias = re.fullmatch(r"(.*?)\.bias(__.*)?", target)  # mobius joins the names of biases
        matrix = matrix_of.get(bias[1], "") if bias else ""
        blocks = [b._replace(source=name, target=f"{b.target}.bias") for b in parts.get(matrix, ())]
        result[name] = blocks or [Block(name, 0, target, 0, 0)]
    return result


def includes_one(model: Network, name: str, target: str, family: str) -> bool:
    """Check whether a norm of the file is 1 + that of transformers, which adds the 1.

    Args:
      model: the model.
      name: of the norm in the file.
      target: its name in transformers.
      family: the model type.
    """
    if family not in _OFFSETS or not target.endswith("norm.weight"):
        return False
    used = uses_by_tensor(model.graph, model.tensors)[name]
    return not any(use.node.op.name == "Add" for use in used)  # the file adds it as well


def split_name(weight: str, module: str) -> list[str]:
    """Return the modules that exporters pack into one weight, or its only module."""
    first, *others = module.split(".weight__")  # mobius joins the names of weights
    stem, _, end = first.rpartition(".")
    if others:
        return [first, *others]
    # the builder's; torch.onnx and mobius write the gate_up_proj of Phi-3 itself
    packs = ".MatMul." in weight and end in _PACKED
    return [f"{stem}.{part}" for part in _PACKED[end]] if packs else [module]


def find_fused_projections(
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
        # fused outputs: count heads of queries, then shared heads of keys and of values each
        count, shared = (node.attributes[key] for key in ("num_heads", "kv_num_heads"))
        size = rows // (count + 2 * shared)
        return count * size, shared * size, shared * size
    if node.op.name == "Split" and node.attributes.get("axis", 0) in (-1, 2):
        sizes = tensors.get(node.inputs[1]) if len(node.inputs) > 1 else None
        equal = [rows // len(node.outputs)] * len(node.outputs)
        parts = (*(equal if sizes is None else np.asarray(sizes).tolist()),)
        return parts if sum(parts) == rows else ()
    return ()


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
    # list the tensors that are learned, without scales and zero points
    roles, uses_of = model._places.roles, uses_by_tensor(model.graph, model.tensors)
    stored = [name for name, weight in meanings.items() if weight.storage]
    packed = {part for name in stored for use in uses_of[name] for part in use.parts}
    looks = {name for name, reader in roles.without_role.items() if reader not in _ROTATE}
    trained = model.params.keys() & uses_of.keys()  # factors of adapters are not read as such
    learnable = {*stored, *roles.of, *looks, *trained} - packed
    learned = [name for name in model.tensors if name in learnable]
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
        warn(
            f"the names of modules are not known for the model type '{family}': they are written "
            "as those of Llama; compare with the keys that transformers reports as missing",
        )
    modules, rows, packed = find_matrices(model, None)
    parts: dict[str, list[Block]] = {}
    for block in find_blocks(modules, rows, packed, family):
        parts.setdefault(block.source, []).append(block)
    tied = {*find_tied(model.graph, model.tensors)}
    wrapper = find_wrapper(modules, model.aliases)
    vectors = find_vectors(learned, model.aliases, modules, parts, family, wrapper)
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
            # raise an InputError if a name that is that of the file says nothing to transformers
            meaning = meanings[name]
            unusable = is_numbered(targets[0].target) or meaning.storage or EXPORTED.search(name)
            if unusable and name not in names:
                raise InputError(
                    f"the name of '{name}' {[*meaning.shape]} in transformers is not known: pass "
                    f"names={{'{name}': ...}}"
                )
        pieces = {block.target: block for block in targets}
        if name in tied and f"{HEAD}.weight" in pieces:
            pieces = {f"{TABLE}.weight": pieces[f"{HEAD}.weight"]}
        for key, block in pieces.items():
            others = result.setdefault(key, [])
            if any(other.start == block.start for other in others):
                raise InputError(
                    f"'{others[0].source}' and '{name}' would both be '{key}' in transformers: "
                    "pass names= for one of them"
                )
            others.append(block)
    return result


def table_of(head: str) -> str:
    """Return the module of the embedding that shares its matrix with an output layer."""
    return head.removesuffix(HEAD) + TABLE if head.endswith(HEAD) else head


def choose_blocks(
    model: Network | None, names: Callable[[str], str] | None, rows: Mapping[str, int]
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
        modules, heights, fused, family = name_modules(rows, names, {}), rows, None, ""
        packs = [w for w, module in modules.items() if len(split_name(w, module)) > 1]
        if packs and names is None:
            raise InputError(
                f"'{packs[0]}' is one matrix for several modules in transformers: pass the model "
                "as well, save(path, model)"
            )
    else:
        modules, heights, fused = find_matrices(model, names)
        family = find_family(model)
        if names is None and is_beside_vision(model):
            modules = {
                name: re.sub(r"^model\.(?=layers\.|embed_tokens$)", BESIDE_VISION, module)
                for name, module in modules.items()
            }
    blocks = find_blocks(modules, heights, fused, family)
    for weight, height in rows.items():
        if sum(block.rows for block in blocks if block.source == weight) != height:
            raise InputError(
                f"the module of '{weight}' in transformers is not known: pass names=, a function "
                "from the name of a weight to that of its module, or save an .npz"
            )
    if not (names or family in (*LIKE_LLAMA, *FAMILIES)) and any(map(EXPORTED.search, rows)):
        example = next(block.target for block in blocks if block.source in rows)
        kind = f"model type '{family}'" if family else "model type, which the file does not tell"
        warn(
            f"the names of modules are not known for this {kind}: they are written as those of "
            f"Llama ('{example}'), and PEFT ignores what it does not find. Load the folder with "
            "genai_config.json, or compare with named_modules() and pass names=",
        )
    return blocks


def describe_base(model: Network | None, base_model: str | None) -> dict[str, Any]:
    """Return the entries about the base model in PEFT's configuration of adapters.

    Args:
      model: the model that they were trained for.
      base_model: its name or path; by default that of the folder that it was loaded from.
    """
    folder = model.folder if model else None
    if folder and not base_model:
        base_model = folder.origin or folder.repository or str(folder.path.absolute())
    about = {"base_model_name_or_path": base_model}
    if model and folder and folder.task == "text-generation" and not is_beside_vision(model):
        about["task_type"] = "CAUSAL_LM"  # AutoPeftModelForCausalLM asks for it
    return about


def place_vectors(
    model: Network, names: Collection[str], blocks: Sequence[Block], unwrap: bool = True
) -> dict[str, list[Block]]:
    """Return the entries of vectors (sources) that are those of transformers' (targets).

    Args:
      model: the model of the vectors.
      names: biases and norms.
      blocks: the rows of its matrices in modules.
      unwrap: leave the prefix of a module around the network out of their names.
    """
    modules, _, _ = find_matrices(model, None)
    beside_vision = is_beside_vision(model)
    parts: dict[str, list[Block]] = {}
    for block in blocks:
        parts.setdefault(block.source, []).append(block)
    wrapper = find_wrapper(modules, model.aliases) if unwrap else ""
    blocks_of = find_vectors(names, model.aliases, modules, parts, find_family(model), wrapper)
    result: dict[str, list[Block]] = {}
    for name, pieces in blocks_of.items():
        for block in pieces:
            target, rows = block.target, block.rows or len(model.tensors[name])
            if beside_vision:
                target = re.sub(r"^model\.(?=layers\.|norm\.)", BESIDE_VISION, target)
            result.setdefault(name, []).append(block._replace(target=target, rows=rows))
    return result

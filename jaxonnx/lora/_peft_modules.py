"""Adapters of a file's weights as those of the modules that PEFT names, and back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxonnx._graph.uses import Weight, weights
from jaxonnx.errors import InputError
from jaxonnx.lora import _files as files
from jaxonnx.lora._files import Change
from jaxonnx.lora._merge import magnitude, pair
from jaxonnx.lora._module_names import (
    EXPORTED,
    FAMILIES,
    LIKE_LLAMA,
    Block,
    find_blocks,
    find_family,
    find_matrices,
    module_name,
    name_modules,
    split_name,
    torch_axes,
)
from jaxonnx.model import Model


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
        warnings.warn(
            f"the names of modules are not known for this {kind}: they are written as those of "
            f"Llama ('{example}'), and PEFT ignores what it does not find. Load the folder with "
            "genai_config.json, or compare with named_modules() and pass names=",
            stacklevel=4,
        )
    return blocks


def read(
    path: str | os.PathLike[str], model: Model, names: Callable[[str], str] | None
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
    modules, rows, fused = find_matrices(model, names)
    places: dict[str, list[Block]] = {}
    layouts = [
        *(find_blocks(modules, rows, fused, key) for key in (find_family(model), "", *FAMILIES)),
        find_blocks({name: (names or module_name)(name) for name in rows}, rows, None, ""),
    ]
    for blocks in layouts:
        targets: dict[str, list[Block]] = {}
        for block in blocks:
            module = files.plain_name(block.target)
            targets.setdefault(module, []).append(block._replace(target=module).invert())
        places = targets | places
    changes, scales, tables, others = files.read(path, places)
    meanings = weights(model.graph, model.tensors)
    for module in changes:
        place = meanings[places[module][0].target].matrix
        if place is not None and place.lookup != (module in tables):  # a tied table, the other way
            a, b, norms = changes[module]
            changes[module] = b.T, a.T, norms
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
    named |= _place_weights(path, model, meanings, others, places)
    return named, rank, rank * scale, files.read_base(path)


def _place_weights(
    path: str | os.PathLike[str],
    model: Model,
    meanings: Mapping[str, Weight],
    others: Mapping[str, np.ndarray],
    places: Mapping[str, Sequence[Block]],
) -> dict[str, np.ndarray]:
    """Return weights that were trained in full by their names in the file, as it has them.

    Raises:
      InputError: a tensor is not known in the file, or is a matrix in few bits there.
    """
    result = {}
    names = {model.aliases.get(name, name): name for name in model.tensors}
    for key, value in others.items():
        module = files.plain_name(key.removesuffix(".weight"))
        blocks = places.get(module, ()) if key.endswith(".weight") else ()
        name = blocks[0].target if len(blocks) == 1 else names.get(key)
        if name is None or meanings[name].storage or value.size != model.tensors[name].size:
            odd = (
                "in few bits" if name and meanings[name].storage else "unknown, or of another size"
            )
            raise InputError(f"'{os.fspath(path)}': '{key}' was trained in full, and is {odd} here")
        order = np.argsort(torch_axes(model, name, meanings[name]))
        result[name] = value.transpose(order)
    return result


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

"""Adapters of a file's weights as those of the modules that PEFT names, and back."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, takewhile
from typing import Any, Protocol, cast

import jax
import numpy as np

from jaxonnx._graph.uses import Weight, find_tied, uses_by_tensor, weights
from jaxonnx._graph.weight_names import module_name
from jaxonnx._weights import Matrix, is_float
from jaxonnx.errors import InputError, warn
from jaxonnx.llm import (
    BESIDE_VISION,
    FAMILIES,
    HEAD,
    TABLE,
    Block,
    choose_blocks,
    describe_base,
    find_blocks,
    find_family,
    find_matrices,
    find_wrapper,
    includes_one,
    place_vectors,
    table_of,
    torch_axes,
)
from jaxonnx.lora import _files as files
from jaxonnx.lora._files import CONVERTED, Change, Settings
from jaxonnx.lora._merge import (
    checksum,
    find_chosen,
    list_adapted,
    list_members,
    magnitude,
    pair,
    refuse_others,
    refuse_rows,
    row_axis,
    unfold_map,
)
from jaxonnx.lora._view import Adaption
from jaxonnx.model import Model
from jaxonnx.quantization import dequantize


class AdapterFields(Protocol):
    """The fields of `Adapters` that a folder of PEFT has."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def layouts(self) -> Mapping[str, Matrix]: ...
    @property
    def values(self) -> Mapping[str, jax.Array]: ...
    @property
    def base(self) -> str: ...
    @property
    def has_magnitudes(self) -> bool: ...


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
    # 1. the rows of weights that are rows of a module, by each way in which modules are named; the
    # first way, of the model's own type, goes before others
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
    # 2. likewise the entries of transformers' vectors (sources) in those of the file (targets)
    candidates = [name for name, tensor in model.tensors.items() if tensor.ndim]
    vectors = {}
    for blocks in layouts:
        targets: dict[str, list[Block]] = {}
        for block in chain(*place_vectors(model, candidates, blocks).values()):
            key = files.plain_name(block.target)
            targets.setdefault(key, []).append(block._replace(target=key).invert())
        vectors = targets | vectors
    # of a module that wraps the network, which folders may have been trained in
    wrapper = find_wrapper(modules, model.aliases)
    for table in (places, vectors):
        for name, blocks in [*table.items()] if wrapper else ():
            other = files.plain_name(wrapper + name)
            table.setdefault(other, [block._replace(source=other) for block in blocks])
        # of a decoder beside a vision encoder: alone, in transformers, and there before 4.52
        for name, blocks in [*table.items()]:
            inner = name.removeprefix(BESIDE_VISION).removeprefix("model.")
            if inner != name and inner.startswith(("layers.", "embed_tokens", "norm.")):
                for stem in ("model.", BESIDE_VISION, "language_model.model."):
                    other = f"{stem}{inner}"
                    table.setdefault(other, [block._replace(source=other) for block in blocks])
        # likewise where no name tells of it ("net.layers.0"), but that all weights have its prefix
        stems = [files.plain_name(module).split(".")[:-1] for module in modules.values()]
        shared = [*takewhile(lambda parts: len({*parts}) == 1, zip(*stems, strict=False))]
        for wrapper in accumulate(f"{part}." for part, *_ in shared):
            for name in [name for name in table if name.startswith(wrapper)]:
                other = name.removeprefix(wrapper)
                blocks = [block._replace(source=other) for block in table[name]]
                table.setdefault(other, blocks)
    tied = find_tied(model.graph, model.tensors)
    places |= {
        table_of(module): blocks
        for module, blocks in [*places.items()]
        if module.endswith(HEAD) and blocks[0].target in tied
    }
    # 3. the changes of modules in the file, less those that training began with (PiSSA, OLoRA)
    contents = files.read(path, places, tied)
    changes, scales, tables = contents.changes, contents.scales, contents.tables
    meanings = weights(model.graph, model.tensors)
    if contents.settings.start:
        for module in changes.keys() - tables:
            matrix = _read_matrix(path, model, module, places, contents.settings.start)
            a, b, norms = changes[module]
            start_a, start_b = _decompose(matrix, len(a), scales[module], contents.settings)
            changes[module] = np.concatenate([a, start_a]), np.hstack([b, -start_b]), norms
    # 4. tables the other way round, and norms of modules in one matrix with those that DoRA changes
    for module in changes:
        name = places[module][0].target
        place = meanings[name].matrix
        if place is not None and place.kernel:
            count_groups(model, name)
        if place is not None and place.lookup != (module in tables):  # a tied table, the other way
            a, b, norms = changes[module]
            changes[module] = b.T, a.T, norms
    for module, change in _keep_norms(path, model, changes, places, layouts).items():
        changes[module], scales[module] = change, next(iter(scales.values()))
    alone = [m for m in changes if places[m][0].target in tied]
    if alone:
        raise InputError(f"'{os.fspath(path)}' adapts '{alone[0]}': {files.describe_ties(tied)}")
    # 5. trained rows of tables, as differences from the rows of the model
    tokens = dict(contents.tokens)
    for module, trained in contents.tokens.items():  # PEFT trains those of a tied layer, too
        matrix = _read_matrix(path, model, module, places)
        tokens |= dict.fromkeys(_find_copies(path, model, module, matrix, places), trained)
    trained_rows = {}
    for module, (indices, values) in tokens.items():
        matrix, (block, *rest) = _read_matrix(path, model, module, places), places[module]
        if rest or block.rows != rows[block.target]:
            raise InputError(
                f"'{os.fspath(path)}' has rows (trainable_token_indices) of '{module}', which in "
                f"this file is a part of '{block.target}'"
            )
        if beyond := [index for index in indices if index >= len(matrix)]:
            raise InputError(
                f"'{os.fspath(path)}' has a trained row {beyond[0]} of '{module}', which has "
                f"{len(matrix)} rows here: model.with_tokens(...) adds rows"
            )
        difference, chosen = (
            values.astype(np.float32) - matrix[indices],
            np.array(indices, np.int32),
        )
        place: Any = meanings[block.target].matrix
        factors = (chosen, difference.T) if place.lookup else (difference, chosen)
        trained_rows |= dict(zip(pair(block.target), factors, strict=True))
        changes.pop(module, None)
    # 6. one scale: where modules differ, those of another scale than most have the quotient in B
    scale = max([*scales.values()], key=[*scales.values()].count, default=1.0)
    for module, (a, b, norms) in changes.items():
        if scales[module] != scale:
            changes[module] = a, scales[module] / scale * b, norms
    moved = move_rows(changes, [block for name in changes for block in places[name]], rows)
    rank = max((a.shape[-2] for a, *_ in moved.values()), default=1)
    named = {
        member: value
        for weight, change in moved.items()
        for member, value in zip((*pair(weight), magnitude(weight)), change, strict=True)
        if value is not None
    }
    named |= trained_rows | _place_weights(path, model, meanings, contents, places, vectors)
    return named, rank, rank * scale, files.read_base(path)


def _keep_norms(
    path: str | os.PathLike[str],
    model: Model,
    changes: Mapping[str, Change],
    places: Mapping[str, Sequence[Block]],
    layouts: Sequence[Sequence[Block]],
) -> dict[str, Change]:
    """Return changes that change nothing, of modules beside ones with norms in one matrix.

    A DoRA adapter of `q_proj` alone leaves `k_proj` as it is: its outputs keep their norms.
    """
    result: dict[str, Change] = {}
    for blocks in layouts:
        packs: dict[str, list[str]] = {}
        for block in blocks:
            packs.setdefault(block.source, []).append(files.plain_name(block.target))
        for modules in packs.values():
            if any(module in changes and changes[module][2] is not None for module in modules):
                for module in {*modules} - changes.keys() - result.keys():
                    matrix = _read_matrix(path, model, module, places)
                    a, b = np.zeros_like(matrix[:1]), np.zeros_like(matrix[:, :1])
                    result[module] = a, b, np.linalg.norm(matrix, axis=1)
    return result


def _read_matrix(
    path: str | os.PathLike[str],
    model: Model,
    module: str,
    places: Mapping[str, Sequence[Block]],
    start: str = "",
) -> np.ndarray:
    """Return the matrix of a module as PEFT has it: a row for each output, or row of a table.

    Raises:
      InputError: it is stored in few bits, and an adapter's `start` follows from its exact values;
        or it is no matrix.
    """
    blocks = sorted(places[module], key=lambda block: block.first)
    meanings = weights(model.graph, model.tensors)
    rows = []
    for block in blocks:
        weight = meanings[block.target]
        if start and weight.storage:
            raise InputError(
                f"'{os.fspath(path)}' starts from '{start}' (init_lora_weights), subtracted from "
                f"the exact weights, and '{block.target}' is stored in few bits: {CONVERTED}"
            )
        place: Any = weight.matrix
        if place.batch or place.kernel:
            raise InputError(f"'{os.fspath(path)}': '{module}' is no matrix in this file")
        (matrix,) = dequantize(model.graph, model.tensors, [block.target]).values()
        whole = unfold_map(matrix, place)[block.start : block.start + block.rows]
        rows.append(whole.T if place.lookup else whole)
    return np.concatenate(rows)


def _find_copies(
    path: str | os.PathLike[str],
    model: Model,
    module: str,
    table: np.ndarray,
    places: Mapping[str, Sequence[Block]],
) -> list[str]:
    """Return the modules whose matrix is that of an embedding, perhaps rounded to few bits."""
    meanings = weights(model.graph, model.tensors)
    place = meanings[places[module][0].target].matrix
    result: list[str] = []
    if place is None or not place.lookup:
        return result
    for other, blocks in places.items():
        weight = meanings[blocks[0].target]
        place = weight.matrix
        if place is None or place.batch or place.kernel or place.lookup:
            continue
        rows = sum(block.rows for block in blocks)
        if (rows, place.sizes(weight.shape)[1]) == table.shape:
            difference = _read_matrix(path, model, other, places) - table
            if np.linalg.norm(difference) < 0.25 * np.linalg.norm(table):
                result.append(other)
    return result


def _decompose(
    matrix: np.ndarray, rank: int, scale: float, settings: Settings
) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B that PEFT starts from and subtracts from the base, times the scale.

    "pissa" (Meng et al., arXiv:2404.02948) takes the largest singular values, "olora" (Büyükakyüz,
    arXiv:2406.01775) the first rows of a QR decomposition, of the matrix as the base has it.
    """
    if settings.start == "pissa":
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        root = np.sqrt(s[:rank] / scale)
        return root[:, None] * v[:rank], u[:, :rank] * root
    q, r = np.linalg.qr(matrix.T if settings.fan_in_fan_out else matrix)
    return (q[:, :rank].T, r[:rank].T) if settings.fan_in_fan_out else (r[:rank], q[:, :rank])


def count_groups(model: Model, name: str) -> int:
    """Return the groups of the convolutions that read a kernel, as PEFT adapts these.

    Its A is a convolution of the same window, stride and padding with zeros, without dilation.

    Raises:
      InputError: a node that reads the kernel computes otherwise.
    """
    shape = weights(model.graph, model.tensors)[name].shape
    groups = 1
    for use in (use for use in uses_by_tensor(model.graph, model.tensors)[name] if not use.passes):
        node = use.node
        groups = node.attributes.get("group", 1)
        padding = _padding_mode(model, node.inputs[0])
        if node.op.name != "Conv" or len(shape) > 5:
            reason = f"is read by {node.op.name}, for which PEFT has no adapters"
        elif {*node.attributes.get("dilations", ())} - {1} and {*shape[2:]} - {1}:
            reason = "is dilated, and PEFT's A is not"
        elif padding != "constant":
            reason = f"reads inputs that are padded by mode '{padding}', and PEFT's A pads by zeros"
        else:
            continue
        raise InputError(
            f"'{name}', a kernel of {node.label}, {reason}: leave this module out, or keep its "
            "adapter in an .npz"
        )
    return groups


def _padding_mode(model: Model, value: str) -> str:
    """Return the mode by which a value was padded, "constant" if it was not."""
    producers = model.graph.producers
    node = producers.get(value)
    if node is not None and node.op.name == "Pad":
        return str(node.attributes.get("mode", "constant"))
    if node is not None and node.op.name == "Concat":  # torch.onnx writes circular padding so
        parts = [producers[name] for name in node.inputs if name in producers]
        cut = {part.inputs[0] for part in parts if part.op.name == "Slice"}
        if not cut.isdisjoint(node.inputs):
            return "circular"
    return "constant"


def _place_weights(
    path: str | os.PathLike[str],
    model: Model,
    meanings: Mapping[str, Weight],
    contents: files.Contents,
    places: Mapping[str, Sequence[Block]],
    vectors: Mapping[str, Sequence[Block]],
) -> dict[str, np.ndarray]:
    """Return weights that were trained in full by their names in the file, as it has them.

    Args:
      path: of the adapters.
      model: the model of the weights.
      meanings: the meaning of its tensors.
      contents: of the adapters.
      places: by module, the rows of its matrix (sources) in those of the file (targets).
      vectors: the same of vectors, by their names.

    Raises:
      InputError: a tensor is not known in the file, or is a matrix in few bits there.
    """
    result: dict[str, np.ndarray] = {}
    others = {files.plain_name(key): value for key, value in contents.others.items()}
    for module, value in contents.biases.items():
        key = f"{module}.bias"
        if key not in vectors:
            raise InputError(
                f"'{os.fspath(path)}' has lora_bias, which adds to the bias of '{module}', and "
                "this module has none in the file: train the adapters without lora_bias"
            )
        present = [model.tensors[b.target][b.start : b.start + b.rows] for b in vectors[key]]
        others[key] = others.get(key, np.concatenate(present).astype(np.float32)) + value
    tied = find_tied(model.graph, model.tensors)
    for key, value in others.items():
        module = key.removesuffix(".weight")
        blocks = places.get(module, ()) if key.endswith(".weight") else ()
        blocks = blocks if len(blocks) == 1 else vectors.get(key, ())
        name = blocks[0].target if blocks else None
        size = model.tensors[name].size if name else 0
        part = name and (len(blocks) > 1 or blocks[0].rows < size == len(model.tensors[name]))
        size = sum(block.rows for block in blocks) if part else size
        alike = tied and sum(np.array_equal(value, other) for other in others.values()) > 1
        rows = None  # of an embedding or output layer, which may have more than there
        if name and not part and not meanings[name].storage:
            is_head = module.removesuffix(".bias").endswith(HEAD)
            if is_head or getattr(meanings[name].matrix, "lookup", False):
                order = torch_axes(model, name, meanings[name])
                present = np.transpose(model.tensors[name], order).astype(np.float32)
                rows = len(present)
                if len(value) < rows and value.shape[1:] == present.shape[1:]:
                    warn(
                        f"'{os.fspath(path)}': '{key}' has {len(value)} rows, and {rows} here: "
                        "those beyond stay as they are"
                    )
                    value = np.concatenate([value.astype(np.float32), present[len(value) :]])
        if name is None and alike:  # an output layer that stayed tied
            continue
        if name is None:
            near = difflib.get_close_matches(key, [*vectors, *(f"{m}.weight" for m in places)], 3)
            hint = files.describe_ties(tied)
            if near and not module.endswith((HEAD, TABLE)):
                hint = f"near it are {', '.join(near)}"
            reason = f"unknown here{hint and f'; {hint}'}"
        elif meanings[name].storage:
            reason = "in few bits here"
        elif value.size != size:
            reason = f"of shape {[*model.tensors[name].shape]} here, not {[*value.shape]}"
            if rows and rows < len(value):
                reason = (
                    f"of {rows} rows here, not {len(value)}: model.with_tokens(...) adds rows; "
                    "name tokens also for rows that only fill the table up (pad_to_multiple_of)"
                )
        elif part:  # of the bias of a matrix that packs several modules
            for block in blocks:
                present = np.array(model.tensors[block.target])
                whole, piece = result.setdefault(block.target, present), value[block.first :]
                whole[block.start : block.start + block.rows] = piece[: block.rows]
            continue
        else:
            present = model.tensors[name]
            value = value.transpose(np.argsort(torch_axes(model, name, meanings[name])))
            if name not in tied or alike:
                is_more = includes_one(model, name, key, find_family(model))
                value = value.astype(np.float32) + 1 if is_more else value
                result[name] = value.astype(present.dtype)  # PEFT has float32 beside 16 bits
                continue
            if np.array_equal(value.astype(present.dtype), np.asarray(present)):
                continue
            reason = f"tied here: {files.describe_ties([name])}"
        raise InputError(f"'{os.fspath(path)}': '{key}' was trained in full, and is {reason}")
    return result


def write(
    path: str | os.PathLike[str],
    adapters: AdapterFields,
    model: Model | None,
    names: Callable[[str], str] | None,
    base_model: str | None,
) -> None:
    """Write a folder of PEFT; the arguments are those of `Adapters.save`, which has the errors."""
    layouts, values = adapters.layouts, adapters.values
    adapted = list_adapted(values, layouts)
    # 1. refuse what PEFT has no form for
    others = {name: x for name, x in values.items() if name not in list_members(layouts)}
    meanings = weights(model.graph, model.tensors) if model else {}
    whole = {n: meanings[n] for n in others if n in meanings and meanings[n].matrix}
    if not model:
        refuse_others(values, layouts)
    if stacked := [name for name, place in layouts.items() if place.batch]:
        raise InputError(f"PEFT has no format for the adapter of '{stacked[0]}'; save an .npz")
    tied = find_tied(model.graph, model.tensors) if model else []
    if tied := [name for name in tied if name in {*adapted, *others}]:
        raise InputError(f"{files.describe_ties(tied)}; or save an .npz or the model")
    kernels = [name for name, place in layouts.items() if place.kernel]
    if kernels and model is None:
        raise InputError(
            f"'{kernels[0]}' is the kernel of a convolution, whose shape PEFT has: pass the "
            "model as well, save(path, model)"
        )
    if model is None:
        refuse_rows(values, layouts, "need the model as well: save(path, model)")
    # 2. adapters of weights as those of modules, of which one may be several of these or a part
    changes = {}
    for name in adapted:
        a, b = (np.asarray(values[member], np.float32) for member in pair(name))
        norms = values.get(magnitude(name))
        changes[name] = a, b, None if norms is None else np.asarray(norms, np.float32)
    rows = {name: len(b) for name, (_, b, _) in changes.items()}
    more = {n: layouts[n] for n in layouts if n not in changes}
    more |= {n: w.matrix for n, w in whole.items() if w.matrix}
    rows |= {name: place.sizes(meanings[name].shape)[0] for name, place in more.items()}
    blocks = choose_blocks(model, names, rows)
    vectors: list[Block] = []
    if model:
        placed = place_vectors(model, others.keys() - whole, blocks, not names)
        vectors = [*chain(*placed.values())]
        if any(not b.target.endswith((".bias", ".weight")) for b in vectors):
            refuse_others(values, layouts, whole)
        # PEFT takes each module whose name ends with that of one that was trained in full, too,
        # and reads all of its tensors
        saved = {block.target for block in blocks if block.source in whole}
        saved |= {b.target.removesuffix(".weight") for b in vectors if b.target[-5:] != ".bias"}
        beside = [b for b in blocks if b.target.endswith((*saved,)) and b.source not in whole]
        for name in (block.source for block in beside):
            if name in changes or not is_float(model.tensors[name]):
                reason = "it has adapters" if name in changes else "it is in few bits"
                raise InputError(
                    f"PEFT takes the module of '{name}' for one that was trained in full "
                    f"(modules_to_save), as its name ends with that of such a one, and {reason}"
                    ": train it in full or without adapters, or save an .npz or the model"
                )
            whole[name] = meanings[name]
            rows[name] = sum(block.rows for block in blocks if block.source == name)
        single = (n for n, x in model.tensors.items() if x.ndim == 1 and is_float(x))
        placed = place_vectors(model, [n for n in single if n not in others], blocks, not names)
        more = [b for b in chain(*placed.values()) if b.target.endswith((".bias", ".weight"))]
        more = [b for b in more if b.target.rpartition(".")[0].endswith((*saved,))]
        vectors += more
        others |= {block.source: model.tensors[block.source] for block in (*beside, *more)}
    heights = {}
    for block in blocks:
        heights[block.target] = heights.get(block.target, 0) + block.rows
    moved = move_rows(changes, blocks, heights)
    if not moved:
        raise InputError("all adapters are still zero: there is nothing to save for PEFT")
    for block in (block for block in blocks if block.source in kernels):
        groups = count_groups(cast(Model, model), block.source)
        if groups > 1 and adapters.has_magnitudes:
            raise InputError(
                f"'{block.source}' is the kernel of a convolution in {groups} groups, and for "
                "these PEFT has no magnitudes (DoRA): save an .npz or the model"
            )
        shape = meanings[block.source].shape
        moved[block.target] = files.fold_convolution(moved[block.target], shape, groups)
    lookups = {name for name, place in layouts.items() if place.lookup}
    tables = {block.target for block in blocks if block.source in lookups}
    # 3. tensors that were trained whole, and biases
    full: dict[str, np.ndarray] = {}
    for block in (block for block in blocks if block.source in whole):
        if not block.rows == heights[block.target] == rows[block.source]:
            refuse_others(values, layouts)
        axes = torch_axes(cast(Model, model), block.source, whole[block.source])
        full[block.target] = np.asarray(others[block.source]).transpose(axes)
    biases: dict[str, np.ndarray] = {}
    family = find_family(model) if model else ""
    for block in sorted(vectors, key=lambda block: block.start):
        module, _, kind = block.target.rpartition(".")
        into = full if kind == "weight" else biases
        piece = np.asarray(others[block.source])[block.first : block.first + block.rows]
        if includes_one(cast(Model, model), block.source, block.target, family):
            piece = piece.astype(np.float32) - 1
        into[module] = np.concatenate([into[module], piece]) if block.start else piece
    about = describe_base(model, base_model)
    scale, tokens = adapters.alpha / adapters.rank, _read_tokens(adapters, model, blocks)
    files.write_peft(path, moved, scale, about, tables, full, biases, adapters.base, tokens)


def _read_tokens(
    adapters: AdapterFields, model: Model | None, blocks: Sequence[Block]
) -> dict[str, tuple[list[int], np.ndarray]]:
    """Return the rows that were trained, and their values, by module, as PEFT has them."""
    tokens: dict[str, tuple[list[int], np.ndarray]] = {}
    if model is None:
        return tokens
    # the model of a run has the changes in its weights, unless these are in few bits
    merged = model.program.find(Adaption) is None and adapters.base
    tied = find_tied(model.graph, model.tensors)
    is_merged = merged and checksum(model, adapters.layouts, adapters.values) != adapters.base
    for block in blocks:
        rows = (
            find_chosen(adapters.values, block.source) if block.source in adapters.layouts else None
        )
        if rows is None:
            continue
        place, rows = adapters.layouts[block.source], np.asarray(rows)
        a, b = (adapters.values[member] for member in pair(block.source))
        (matrix,) = dequantize(model.graph, model.tensors, [block.source]).values()
        present = matrix.take(rows, row_axis(place))
        present = present.T if row_axis(place) else present
        changes = np.asarray(b).T if a.ndim == 1 else np.asarray(a)
        module = table_of(block.target) if block.source in tied else block.target
        tokens[module] = rows.tolist(), present if is_merged else present + changes
    return tokens


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
                    + "; model.with_tokens(...) adds rows"
                    * source.endswith((HEAD, TABLE))
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

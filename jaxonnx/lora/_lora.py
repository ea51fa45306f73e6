"""The settings of low-rank adapters, and where they start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._display import list_some
from jaxonnx._graph.projections import ROLES, Role, find_projections
from jaxonnx._graph.select import Select, select
from jaxonnx._graph.stored import check_stored
from jaxonnx._graph.uses import Weight, weights
from jaxonnx._require import check_arguments, require
from jaxonnx._rewrite.masks import describe_masks
from jaxonnx._weights import Matrix, is_float
from jaxonnx.errors import InputError, warn
from jaxonnx.lora._adapters import Adapters
from jaxonnx.lora._merge import (
    check_magnitudes,
    check_scale,
    index_member,
    magnitude,
    pair,
)
from jaxonnx.lora._view import drop_inputs
from jaxonnx.lowering import norms, unfold_change
from jaxonnx.model import Model
from jaxonnx.quantization import dequantize


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters for `jaxonnx.train(..., lora=)`: W becomes W + alpha / rank * B A.

    W (outputs x inputs) is the matrix of a MatMul, a Gemm (with or without transB), an Einsum, a
    recurrent layer, a Conv (inputs: the channels of a group at every place of the kernel) or an
    embedding (inputs: its rows), also of a fused operator and behind a Transpose. A (rank x inputs)
    starts normal with variance 1 / inputs (1 / rank for an embedding), B (outputs x rank) starts at
    zero, so that training starts from the model as it is. Weights of half precision have adapters
    in float32. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021
    (arXiv:2106.09685).

    The rows of tokens that `Model.with_tokens` added are trained beside the adapters, as PEFT's
    `trainable_token_indices` are, in the embedding and in the output layer. They start as they are,
    and rank, alpha and dropout do not apply to them.

    The memory of the optimizer and the exported file are small. Matrices of MatMul and Gemm in
    float32 have no dense gradient: x passes through A, then B. Into other weights the change is
    merged in each step, so that a dense gradient of each exists for a moment.

    >>> import jax, jaxonnx
    >>> from jaxonnx import demo
    >>> adapted = jaxonnx.LoRA(rank=4, where="12.*").attach(demo.model(), jax.random.key(0))
    >>> {name: list(value.shape) for name, value in adapted.params.items()}
    {'12.weight.lora_A': [4, 128], '12.weight.lora_B': [64, 4]}

    Attributes:
      rank: of B A; at most the number of outputs and of inputs of each weight.
      alpha: the change is scaled by alpha / rank; None means the rank, a scale of one.
      where: a role in a transformer, "attention", "mlp" or "all-linear" (both, but not the layer of
        the logits), which the graph tells; or tensors, modules or nodes ("*.query"), as in
        `Model.with_trainable`, or a predicate of name and value, that choose among the weights that
        can be adapted. Packed experts (QMoE) have no role: name them. None means every matrix
        product and convolution whose adapter is smaller than the weight, embeddings and layers that
        share their table left out.
      dora: DoRA (Liu et al., "Weight-Decomposed Low-Rank Adaptation", 2024, arXiv:2402.09353): the
        matrix becomes m (W + alpha / rank * B A) / n. Here n are the norms of the rows of the sum,
        without a gradient, and m (".lora_magnitude") is trained and starts as n. Each step computes
        the norms; of a matrix in few bits it dequantizes some rows after others. An output whose
        weights are all 0 stays 0.
      dropout: the share of the inputs of A that training drops, as `lora_dropout` of PEFT. For
        matrices and embeddings, of which it drops nothing; adapters of convolutions and the like
        are added to the weights in each step, and have no inputs. `Adapters` do not record it.
    """

    rank: int = 8
    alpha: float | None = None
    where: Select | None = None
    dora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_arguments(LoRA, vars(self))
        require("dropout", self.dropout, 0 <= self.dropout < 1, "a number in [0, 1)")
        check_scale(self.rank, self.alpha)

    def attach(self, model: Model, rng: jax.Array, *, trainable: Select | None = None) -> Model:
        """Return the model with adapters as its parameters; its weights become state.

        It is a Model like any other: `apply`, `apply_train` and `jaxonnx.flax` take it, `save`
        writes the merged weights, and `merge_adapters()` returns a plain model.

        Args:
          model: a model without adapters.
          rng: a key for the values of A.
          trainable: tensors that are trained in full beside the adapters, such as a new head.

        Raises:
          InputError: `where` or `trainable` match nothing, or the rank does not fit a weight; or,
            with `dora`, a weight in few bits is multiplied as it is stored (QMoE,
            MatMulIntegerToFloat).
        """
        check_arguments(LoRA.attach, locals())
        full = {} if trainable is None else model.with_trainable(trainable).params
        tensors = model.tensors
        meanings = {
            name: weight
            for name, weight in weights(model.graph, tensors).items()
            if weight.matrix and name not in full and (is_float(tensors[name]) or weight.storage)
        }
        places = self._select_weights(model, meanings)
        check_stored(model.graph, tensors, [name for name in places if meanings[name].storage])
        values = dict(full)
        for name, key in zip(places, jax.random.split(rng, len(places)), strict=True):
            values |= self._start(name, tensors[name].dtype, meanings[name], key)
        alpha = self.rank if self.alpha is None else self.alpha
        if self.dora:
            check_magnitudes(model, places)
            for name, matrix in dequantize(model.graph, tensors, places).items():
                place, (a, b) = places[name], (values[member] for member in pair(name))
                change = unfold_change(a, b * (alpha / self.rank), place, matrix.shape)
                values[magnitude(name)] = norms(matrix + change, place.summed_axes).astype(b.dtype)
        for name, rows in model.new_rows.items():
            place = meanings[name].matrix if name in meanings else None
            if place is None or name in places:
                continue  # trained in full, or as a whole
            check_stored(model.graph, tensors, [name] if meanings[name].storage else [])
            width = place.sizes(meanings[name].shape)[0 if place.lookup else 1]
            changes = np.zeros((width, len(rows)) if place.lookup else (len(rows), width))
            values |= dict.fromkeys(pair(name), jnp.asarray(changes, jnp.float32))
            values[index_member(name, place)] = jnp.asarray(rows, jnp.int32)
            places = {**places, name: place}
        adapted = Adapters(self.rank, alpha, places, values).attach(model)
        return drop_inputs(adapted, self.dropout) if self.dropout else adapted

    def _select_weights(self, model: Model, meanings: Mapping[str, Weight]) -> dict[str, Matrix]:
        """Return the weights to be adapted."""
        tensors = model.tensors
        places = {name: weight.matrix for name, weight in meanings.items() if weight.matrix}
        sizes = {name: place.sizes(meanings[name].shape) for name, place in places.items()}
        # a file has no place for adapters of packed experts (QMoE): only names choose these
        inseparable = {name for name in places if places[name].batch and meanings[name].storage}
        # a vision encoder stays as it is, unless it is named
        frozen = {name for name in places if model.companion.freezes(name)}
        if self.where is None:
            chosen = {
                name
                for name, (rows, columns) in sizes.items()
                if not places[name].lookup
                and name not in inseparable | model._factors | frozen
                and self.rank * (rows + columns) < rows * columns
            }
            if not chosen and (masked := describe_masks(model.graph, tensors)):
                raise InputError(f"no weight can be adapted: {masked}")
            if not chosen:
                raise InputError(
                    f"no weight is larger than its adapter of rank {self.rank}; choose a lower "
                    "rank, or name weights with where="
                )
        elif self.where in ROLES:
            fixed = model.program.constants  # tables, unless they are weights in few bits
            adaptable = {name for name in places if meanings[name].storage or name not in fixed}
            vectors = {name for name in places if 1 in sizes[name]}  # a probe, which attends
            adaptable -= inseparable | model._factors | vectors
            role = cast(Role, self.where)
            chosen = find_projections(model.graph, tensors, adaptable, role) - frozen
            if not chosen:
                raise InputError(
                    f"where={self.where!r}: no weight has this role in the graph; name weights, "
                    "modules or nodes"
                )
        else:
            matrices = {name: tensors[name] for name in places}
            kind = "weight that can be adapted"
            earlier = model._factors  # which lie in the module of their weight
            chosen = select(self.where, matrices, "where", earlier, kind, model._places)
        if inseparable and self.where in (None, "mlp", "all-linear"):
            warn(
                f"where={self.where!r} adapts no packed experts, for which files have no adapters: "
                f"{list_some(sorted(map(repr, inseparable)), '')}; where= with their names does",
            )
        for name in sorted(chosen):
            if self.rank > min(sizes[name]):
                rows, columns = sizes[name]
                raise InputError(
                    f"rank={self.rank} is too much for '{name}' of shape "
                    f"{list(meanings[name].shape)}, a matrix of {rows} x {columns}; choose at most "
                    f"{min(sizes[name])}, or leave it out of where="
                )
        return {name: place for name, place in places.items() if name in chosen}

    def _start(
        self, name: str, stored: np.dtype, weight: Weight, key: jax.Array
    ) -> dict[str, jax.Array]:
        place: Any = weight.matrix
        a, b = place.factors(weight.shape, self.rank)
        dtype = jnp.float32 if weight.storage else jnp.promote_types(stored, jnp.float32)
        scale = 1 / math.sqrt(self.rank if place.lookup else a[-1])
        # one program for each power of two, where JAX would compile one for each shape; the numbers
        # of threefry do not depend on how many are drawn
        size = math.prod(a)
        drawn = np.asarray(jax.random.normal(key, (1 << (size - 1).bit_length(),), dtype))
        values = scale * drawn[:size].reshape(a), np.zeros(b, dtype)
        return dict(zip(pair(name), map(jnp.asarray, values), strict=True))

"""LoRA: low-rank changes of weights, trained while the weights themselves stay fixed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._axes import Matrix
from jaxonnx._graph.projections import ROLES, Role, find_projections
from jaxonnx._graph.roles import running_statistics
from jaxonnx._graph.select import Select, select
from jaxonnx._graph.uses import Weight, check_stored, weights
from jaxonnx._io import adapter_files
from jaxonnx._rewrite.adapters import factor_names, module_name
from jaxonnx._safe_read import reading
from jaxonnx.errors import InputError, ModelError
from jaxonnx.lowering import Changed, LowRank, is_half
from jaxonnx.model import Model

_ABOUT = "jaxonnx.lora"
"""The array of a file that holds its metadata, as JSON."""


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
        can be adapted. None means every matrix product and convolution whose adapter is smaller
        than the weight, embeddings and layers that share their table left out.
    """

    rank: int = 8
    alpha: float | None = None
    where: Select | None = None

    def __post_init__(self) -> None:
        _check_scale(self.rank, self.alpha)

    def attach(self, model: Model, rng: jax.Array, *, trainable: Select | None = None) -> Model:
        """Return the model with adapters as its parameters; its weights become state.

        It is a Model like any other: `apply`, `apply_train` and `jaxonnx.flax` take it, `save`
        writes the merged weights, and `merged()` returns a plain model.

        Args:
          model: a model without adapters.
          rng: a key for the values of A.
          trainable: tensors that are trained in full beside the adapters, such as a new head.

        Raises:
          InputError: `where` or `trainable` match nothing, or the rank does not fit a weight.
        """
        full = {} if trainable is None else model.with_trainable(trainable).params
        tensors = model.tensors
        found = {
            name: weight
            for name, weight in weights(model.graph, tensors).items()
            if weight.matrix and name not in full and (_is_float(tensors[name]) or weight.storage)
        }
        places = self._select_weights(model, found)
        check_stored(model.graph, tensors, [name for name in places if found[name].storage])
        values = dict(full)
        for name, key in zip(places, jax.random.split(rng, len(places)), strict=True):
            values |= self._start(name, tensors[name].dtype, found[name], key)
        alpha = self.rank if self.alpha is None else self.alpha
        return Adapters(self.rank, alpha, places, values).attach(model)

    def _select_weights(self, model: Model, found: Mapping[str, Weight]) -> dict[str, Matrix]:
        """Return the weights to be adapted."""
        tensors = model.tensors
        places = {name: weight.matrix for name, weight in found.items() if weight.matrix}
        sizes = {name: place.sizes(found[name].shape) for name, place in places.items()}
        if self.where is None:
            chosen = {
                name
                for name, (rows, columns) in sizes.items()
                if not places[name].lookup and self.rank * (rows + columns) < rows * columns
            }
            if not chosen:
                raise InputError(
                    f"no weight is larger than its adapter of rank {self.rank}; choose a lower "
                    "rank, or name weights with where="
                )
        elif self.where in ROLES:
            fixed = model.program.constants  # tables, unless they are weights in few bits
            known = {name for name in places if found[name].storage or name not in fixed}
            chosen = find_projections(model.graph, tensors, known, cast(Role, self.where))
            if not chosen:
                raise InputError(
                    f"where={self.where!r}: no weight has this role in the graph; name weights, "
                    "modules or nodes"
                )
        else:
            matrices = {name: tensors[name] for name in places}
            kind = "weight that can be adapted"
            chosen = select(self.where, matrices, "where", kind=kind, places=model._places)
        for name in sorted(chosen):
            if self.rank > min(sizes[name]):
                rows, columns = sizes[name]
                raise InputError(
                    f"rank={self.rank} is too much for '{name}' of shape "
                    f"{list(found[name].shape)}, a matrix of {rows} x {columns}; choose at most "
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
        values = scale * jax.random.normal(key, a, dtype), jnp.zeros(b, dtype)
        return dict(zip(_pair(name), values, strict=True))


@dataclass(frozen=True)
class Adapters:
    """Trained adapters, apart from the model whose weights they change.

    Attributes:
      rank, alpha: as in `LoRA`.
      layouts: the adapted weights, and what their axes mean.
      values: by name: A ("<weight>.lora_A", rank x inputs) and B ("<weight>.lora_B", outputs x
        rank) of each weight, tensors that were trained in full, and running statistics.
    """

    rank: int
    alpha: float
    layouts: Mapping[str, Matrix]
    values: Mapping[str, jax.Array]

    def __post_init__(self) -> None:
        _check_scale(self.rank, self.alpha)
        for name in self.layouts:
            a, b = (getattr(self.values.get(member), "shape", ()) for member in _pair(name))
            if (a[-2:-1], b[-1:]) != ((self.rank,), (self.rank,)) or len(a) != len(b):
                shapes = f"A {[*a]} and B {[*b]}"
                raise InputError(f"'{name}': {shapes} are not of rank {self.rank}")

    @classmethod
    def of(cls, model: Model) -> Adapters:
        """Return the adapters of a model, with their present values.

        Raises:
          InputError: the model has none.
        """
        merge = model.program.adaption
        if not isinstance(merge, _Merge):
            raise InputError("the model has no adapters; LoRA.attach gives it some")
        statistics = running_statistics(model.graph)
        renewed = {name: v for name, v in model.state.items() if name in statistics}
        return cls(merge.rank, merge.alpha, merge.layouts, {**model.params, **renewed})

    def are_apart(self, model: Model) -> bool:
        """Check whether any weight that they change is stored in few bits, and stays as it is."""
        return any(not _is_float(model.tensors[name]) for name in self.layouts)

    def apply(self, model: Model) -> Model:
        """Return `attach(model).merge_adapters()`, a plain model."""
        return self.attach(model).merge_adapters()

    def attach(self, model: Model) -> Model:
        """Return the model with these adapters as its parameters, to be trained further.

        Raises:
          InputError: the model does not have these weights, or in other shapes; or it has adapters.
        """
        if model.program.adaption is not None:
            raise InputError(
                "the model has adapters already; merge them first with .merge_adapters()"
            )
        self._check(model)
        statistics = running_statistics(model.graph)
        values = {name: jnp.asarray(value) for name, value in self.values.items()}
        params = {name: value for name, value in values.items() if name not in statistics}
        constants = model.program.constants
        moved = {n: jnp.asarray(constants[n]) for n in {*params, *self.layouts} & constants.keys()}
        tensors = {**model.state, **model.params, **moved, **values}
        pairs = {member for name in self.layouts for member in _pair(name)}
        trained = dict.fromkeys([*model.params, *self.layouts, *(params.keys() - pairs)])
        stored = tuple(name for name in self.layouts if not _is_float(tensors[name]))
        merge = _Merge(tuple(trained), self.rank, self.alpha, self.layouts, stored)
        constants = {name: v for name, v in constants.items() if name not in moved}
        return dataclasses.replace(
            model,
            params=params,
            state={name: value for name, value in tensors.items() if name not in params},
            program=dataclasses.replace(model.program, constants=constants, adaption=merge),
        )

    def to_inputs(
        self, names: Callable[[str], str] = module_name, dtype: Any = np.float32
    ) -> dict[str, np.ndarray]:
        """Return what `Model.save(..., adapters="inputs")` has inputs for, by their names.

        A has the shape (inputs, rank), B (rank, outputs), and alpha / rank is multiplied into B,
        as Olive has them: "model.layers.0.attn.q_proj.lora_A.weight".

        Args:
          names: the module of a weight; by default its name without ".weight" and the like.
          dtype: that of the model's activations.

        Raises:
          InputError: tensors were trained in full beside the adapters, which no such file holds.
        """
        factors = {member for name in self.layouts for member in _pair(name)}
        if others := [name for name in self.values if name not in factors]:
            raise InputError(
                f"'{others[0]}' was trained beside the adapters, which only .npz files hold; "
                "leave it out of trainable=, or save the model"
            )
        scale, result = self.alpha / self.rank, {}
        for name in self.layouts:
            a, b = (np.asarray(self.values[member]).swapaxes(-1, -2) for member in _pair(name))
            for member, value in zip(factor_names(name, names), (a, b * scale), strict=True):
                result[member] = np.ascontiguousarray(value.astype(dtype))
        return result

    def save(self, path: str | os.PathLike, *, names: Callable[[str], str] = module_name) -> None:
        """Write the adapters to a small file, or to a folder as PEFT has it.

        Args:
          path: of an .npz, which has all values and what their axes mean; of an .onnx_adapter for
            `onnxruntime.LoraAdapter` and a model saved with `adapters="inputs"`; or a folder (one
            that exists, or with a slash at its end) for `adapter_model.safetensors` and
            `adapter_config.json`.
          names: as in `to_inputs`, for the two latter.

        Raises:
          InputError: tensors were trained in full, or weights are no matrices: only .npz has them.
          OSError: the path cannot be written; a file that was there stays.
        """
        if os.fspath(path).endswith(adapter_files.SUFFIX):
            return adapter_files.write_onnx_adapter(path, self.to_inputs(names))
        if os.path.isdir(path) or os.fspath(path).endswith(("/", os.sep)):
            odd = [n for n, p in self.layouts.items() if p.kernel or p.batch or p.lookup]
            if odd:
                raise InputError(f"PEFT has no such adapter as that of '{odd[0]}'; save an .npz")
            return adapter_files.write_peft(path, self.to_inputs(names), self.rank)
        about = json.dumps(self.about).encode()
        arrays = {**self.values, _ABOUT: np.frombuffer(about, np.uint8)}
        from jaxonnx import sparse

        sparse.save(path, arrays, {}, layers=())

    @property
    def about(self) -> dict[str, Any]:
        """Rank, alpha and layouts, as JSON has them."""
        places = {name: dataclasses.asdict(place) for name, place in self.layouts.items()}
        return {"rank": self.rank, "alpha": self.alpha, "layouts": places}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        model: Model | None = None,
        *,
        names: Callable[[str], str] = module_name,
    ) -> Adapters:
        """Load the adapters that `save` wrote, or those of the newest checkpoint in a folder.

        Args:
          path: an .npz, a folder of checkpoints; or an .onnx_adapter, or a folder of PEFT.
          model: whose weights the two latter change.
          names: as in `to_inputs`; "self_attn" and "attn" count as one.

        Raises:
          InputError: the adapters are of another model, or of a kind that is not LoRA.
          ModelError: the file or folder holds no adapters, or is damaged.
        """
        if adapter_files.is_foreign(path):
            if model is None:
                raise InputError(f"'{os.fspath(path)}' names modules: pass the model as well")
            found = {
                name: weight.matrix
                for name, weight in weights(model.graph, model.tensors).items()
                if weight.matrix and (_is_float(model.tensors[name]) or weight.storage)
            }
            factors, rank, alpha = adapter_files.read(path, {names(name): name for name in found})
            layouts = {name: at for name, at in found.items() if _pair(name)[0] in factors}
            arrays = {name: jnp.asarray(x, jnp.float32) for name, x in factors.items()}
            result = cls(rank, alpha, layouts, arrays)
            result._check(model)
            return result
        with reading(
            f"'{os.fspath(path)}' holds no adapters of jaxonnx, or is damaged", ModelError
        ):
            if os.path.isdir(path):
                from jaxonnx._io import checkpoints

                newest = checkpoints.read(path)
                values, about = newest.tensors, newest.adapters or {}
            else:
                from jaxonnx import sparse

                values, _ = sparse.load(path)
                about = json.loads(values.pop(_ABOUT).tobytes())
            places = {name: Matrix.read(entry) for name, entry in about["layouts"].items()}
            for name, value in values.items():
                factor = name.endswith((".lora_A", ".lora_B"))
                if (~np.isfinite(value) if factor else np.isnan(value)).any():
                    raise ValueError(f"'{name}' has values that are not finite")
            arrays = {name: jnp.asarray(value) for name, value in values.items()}
            return cls(about["rank"], float(about["alpha"]), places, arrays)

    def _check(self, model: Model) -> None:
        shapes = {name: w.shape for name, w in weights(model.graph, model.tensors).items()}
        wanted = {name: v.shape for name, v in self.values.items()}
        for name, place in self.layouts.items():
            if name not in shapes:
                raise InputError(f"the adapters are of another model: it has no weight '{name}'")
            pair, axes = tuple(map(wanted.pop, _pair(name))), [*range(len(shapes[name]))]
            if sorted(place.order) != axes or pair != place.factors(shapes[name], self.rank):
                raise InputError(
                    f"the adapters are of another model: its '{name}' has shape "
                    f"{list(shapes[name])}"
                )
        for name, shape in wanted.items():
            if shapes.get(name) != shape:
                raise InputError(
                    f"the adapters are of another model: it has no '{name}' of shape {list(shape)}"
                )


@dataclass(frozen=True)
class _Merge:
    """The sum of the file's weights and the adapters (a `program.Adaption`)."""

    params: tuple[str, ...]
    rank: int
    alpha: float
    layouts: Mapping[str, Matrix]
    stored: tuple[str, ...] = ()

    def factors(self, tensors: Mapping[str, Any]) -> dict[str, tuple[Matrix, Any, Any]]:
        pairs = {name: [tensors[member] for member in _pair(name)] for name in self.layouts}
        scale = self.alpha / self.rank
        return {
            name: (self.layouts[name], jnp.matrix_transpose(a), jnp.matrix_transpose(b) * scale)
            for name, (a, b) in pairs.items()
        }

    def without_factors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        members = {member for name in self.layouts for member in _pair(name)}
        return {name: value for name, value in tensors.items() if name not in members}

    def __call__(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(tensors)
        for name, place in self.layouts.items():
            a, b = (result.pop(member) for member in _pair(name))
            w = tensors[name]
            plain = w.ndim == 2 and w.dtype == a.dtype and not is_half(w)
            if plain or not (_is_float(w) or place.kernel or place.batch):
                b = b * (self.alpha / self.rank)
                result[name] = LowRank(w, a.T, b.T) if place.output else LowRank(w, b, a)
                continue
            # b a has the axes (batch..., output, input and kernel in one)
            order = (*place.batch, place.output, place.input, *place.kernel)
            change = (b @ a * (self.alpha / self.rank)).reshape([w.shape[i] for i in order])
            change = change.transpose(np.argsort(order))
            result[name] = (w + change).astype(w.dtype) if _is_float(w) else Changed(w, change)
        return result


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def _check_scale(rank: Any, alpha: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InputError(f"rank must be a positive integer, and is {rank!r}")
    if alpha is not None and not 0 < alpha < math.inf:
        raise InputError(f"alpha must be a positive number, and is {alpha!r}")


def _pair(name: str) -> tuple[str, str]:
    return f"{name}.lora_A", f"{name}.lora_B"

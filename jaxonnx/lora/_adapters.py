"""Adapters apart from the model whose weights they change."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxonnx._files import wrap_errors
from jaxonnx._graph.roles import running_statistics
from jaxonnx._graph.uses import weights
from jaxonnx._graph.weight_names import module_name
from jaxonnx._require import check_arguments
from jaxonnx._weights import Matrix, is_float
from jaxonnx.errors import InputError, ModelError, warn
from jaxonnx.lora import _files as files
from jaxonnx.lora import _peft_modules as peft_modules
from jaxonnx.lora._merge import (
    check_magnitudes,
    check_scale,
    checksum,
    find_chosen,
    index_member,
    list_adapted,
    list_members,
    magnitude,
    pair,
    refuse_others,
    refuse_rows,
    warn_about_ties,
)
from jaxonnx.lora._view import Adaption, factor_names, magnitude_name
from jaxonnx.model import Model

_ABOUT = "jaxonnx.lora"
"""The array of a file that holds its metadata, as JSON."""


@dataclass(frozen=True)
class Adapters:
    """Trained adapters, apart from the model whose weights they change.

    Attributes:
      rank, alpha: as in `LoRA`; the scale of every change is alpha / rank, also of those whose own
        rank is lower.
      layouts: the adapted weights, and what their axes mean.
      values: by name: A ("<weight>.lora_A", rank x inputs) and B ("<weight>.lora_B", outputs x
        rank) of each weight, with DoRA the norms of its outputs ("<weight>.lora_magnitude"),
        tensors that were trained in full, and running statistics. Where rows of an embedding or of
        its output layer were trained (`Model.with_tokens`), one factor has their indices, int32[n],
        and the other one their changes, which alpha / rank does not scale.
      base: a checksum of the weights that they were trained for; "" if it is not known.
      model: the model of a run that trained them, by which `save` names the modules of PEFT.
    """

    rank: int
    alpha: float
    layouts: Mapping[str, Matrix]
    values: Mapping[str, jax.Array]
    base: str = ""
    model: Model | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_scale(self.rank, self.alpha)
        ranks = set()
        for name in self.layouts:
            a, b = (getattr(self.values.get(member), "shape", ()) for member in pair(name))
            if {len(a), len(b)} == {1, 2} and a[:1] == b[-1:]:  # the rows of tokens
                continue
            rank = a[-2:-1]  # a lower rank is that of a folder of PEFT
            if not rank or rank != b[-1:] or not 0 < rank[0] <= self.rank or len(a) != len(b):
                shapes = f"A {[*a]} and B {[*b]}"
                raise InputError(f"'{name}': {shapes} are not of rank {self.rank}")
            ranks.add(rank[0])
        if ranks and self.rank not in ranks:
            raise InputError(f"the adapters are not of rank {self.rank} but of {max(ranks)}")

    @classmethod
    def of(cls, model: Model) -> Adapters:
        """Return the adapters of a model, with their present values.

        Raises:
          InputError: the model has no adapters.
        """
        merge = model.program.find(Adaption)
        if merge is None:
            raise InputError("the model has no adapters; LoRA.attach gives it some")
        statistics = running_statistics(model.graph)
        rows = {member for name in merge.layouts for member in pair(name)}
        others = {name: v for name, v in model.state.items() if name in statistics | rows}
        values, base = {**model.params, **others}, checksum(model, merge.layouts, model.tensors)
        return cls(merge.rank, merge.alpha, merge.layouts, values, base)

    @property
    def has_magnitudes(self) -> bool:
        """Whether outputs of weights are scaled to trained norms, as `LoRA(dora=True)` does."""
        return any(magnitude(name) in self.values for name in self.layouts)

    def are_apart(self, model: Model) -> bool:
        """Check whether any weight that they change is stored in few bits, and stays as it is."""
        check_arguments(Adapters.are_apart, locals())
        return any(not is_float(model.tensors[name]) for name in self.layouts)

    @classmethod
    def combine(
        cls,
        adapters: Sequence[Adapters],
        weights: Sequence[float],
        method: Literal["cat", "linear"] = "cat",
    ) -> Adapters:
        """Combine adapters of one model to one, as `add_weighted_adapter` of PEFT does.

        Args:
          adapters: to combine; a weight of the model may have changes in some of them only.
          weights: the factor of each change.
          method: "cat", whose change is the weighted sum of the changes and whose rank is the sum
            of their ranks; "linear", whose A and B are sums of A and of B, each with the root of
            the factor, so that the rank stays. The result is another than PEFT's
            for modules whose share of the scale (`alpha_pattern`, `rank_pattern`) differs between
            folders; and where the first folder has `use_rslora`: PEFT 0.21 then multiplies the
            change by the root of the new rank, with both methods.

        Raises:
          InputError: the adapters are of different models or, but for "cat", ranks, also of modules
            that the file has in one matrix; or have magnitudes (DoRA) or weights that were trained
            in full.
        """
        check_arguments(Adapters.combine, locals())
        if not adapters or len(adapters) != len(weights):
            raise InputError(f"{len(adapters)} adapters and {len(weights)} weights to combine")
        for each in adapters:
            refuse_others(
                each.values,
                each.layouts,
                reason="cannot be combined: merge one, adapters.apply(model), and train another on "
                "the result",
            )
            refuse_rows(
                each.values,
                each.layouts,
                "cannot be combined: save the models, or train on in one run",
            )
            if each.has_magnitudes:
                raise InputError(
                    "adapters with magnitudes (DoRA) cannot be combined: these are norms of the "
                    "base plus one change (PEFT drops them). Merge one, adapters.apply(model), and "
                    "train another on the result"
                )
        bases = {each.base for each in adapters if each.base}
        if len(bases) > 1:
            raise InputError("the adapters were trained for different models")
        layouts = {name: place for each in adapters for name, place in each.layouts.items()}
        values: dict[str, jax.Array] = {}
        for name in layouts:
            having = [(x, w) for x, w in zip(adapters, weights, strict=True) if name in x.layouts]
            pairs = [[np.asarray(x.values[m], np.float32) for m in pair(name)] for x, _ in having]
            if method != "cat":
                if len({a.shape for a, _ in pairs}) > 1:
                    raise InputError(
                        f"'{name}' has adapters of several ranks: method='cat' takes them"
                    )
                # of each column of B the outputs that it changes: in qkv_proj those of q_proj, say
                changed = np.stack([(b != 0).reshape(-1, b.shape[-1]) for _, b in pairs])
                if (changed.any(1).all(0) & ~changed.all(0).any(0)).any():
                    raise InputError(
                        f"'{name}' is one matrix of several modules, whose ranks differ between "
                        "these adapters: method='cat' takes them"
                    )
            scaled = np.asarray([weight * x.alpha / x.rank for x, weight in having], np.float32)
            (a, b), roots = zip(*pairs, strict=True), np.sqrt(np.abs(scaled))
            if method == "cat":
                a = np.concatenate(a, axis=-2)
                b = np.concatenate([w * x for w, x in zip(scaled, b, strict=True)], axis=-1)
            else:  # the sign on one side: a change is a product
                a = np.tensordot(np.copysign(roots, scaled), np.stack(a), 1)
                b = np.tensordot(roots, np.stack(b), 1)
            values |= dict(zip(pair(name), (jnp.asarray(a), jnp.asarray(b)), strict=True))
        rank = max(values[pair(name)[0]].shape[-2] for name in layouts)
        return cls(rank, float(rank), layouts, values, next(iter(bases), ""))

    def apply(self, model: Model, *, check: bool = True) -> Model:
        """Return `attach(model).merge_adapters(check=check)`, a plain model."""
        check_arguments(Adapters.apply, locals())
        return self.attach(model).merge_adapters(check=check)

    def attach(self, model: Model) -> Model:
        """Return the model with these adapters as its parameters, to be trained further.

        Raises:
          InputError: the model does not have these weights, or in other shapes; or it has adapters.
        """
        check_arguments(Adapters.attach, locals())
        if model.program.find(Adaption) is not None:
            raise InputError(
                "the model has adapters already: attach these to the model without them, or to "
                "model.merge_adapters(), which computes both"
            )
        self._check(model)
        warn_about_ties(model, {*list_adapted(self.values, self.layouts), *self.values})
        if self.base and self.base != checksum(model, self.layouts, self.values):
            warn(
                "the adapters were trained for other values of these weights, and the model may "
                "not compute what it learned: attach them to the file that was trained",
            )
        statistics = running_statistics(model.graph)
        values = {name: jnp.asarray(value) for name, value in self.values.items()}
        rows = [name for name, value in values.items() if jnp.issubdtype(value.dtype, jnp.integer)]
        params = {n: value for n, value in values.items() if n not in statistics and n not in rows}
        constants = model.program.constants
        moved = {n: jnp.asarray(constants[n]) for n in {*params, *self.layouts} & constants.keys()}
        tensors = {**model.state, **model.params, **moved, **values}
        pairs = list_members(self.layouts)
        trained = dict.fromkeys([*model.params, *self.layouts, *(params.keys() - pairs)])
        stored = tuple(name for name in self.layouts if not is_float(tensors[name]))
        view = Adaption(tuple(trained), self.rank, self.alpha, self.layouts, stored)
        constants = {name: v for name, v in constants.items() if name not in moved}
        return dataclasses.replace(
            model,
            params=params,
            state={name: value for name, value in tensors.items() if name not in params},
            program=dataclasses.replace(model.program.enter(view), constants=constants),
        )

    def to_inputs(
        self, names: Callable[[str], str] = module_name, dtype: Any = np.float32
    ) -> dict[str, np.ndarray]:
        """Return the factors as the inputs of a file saved with `adapters="inputs"`, by name.

        A has the shape (inputs, rank), B (rank, outputs), and alpha / rank is multiplied into B,
        as Olive has them: "model.layers.0.attn.q_proj.lora_A.weight".

        Args:
          names: the module of a weight; by default its name without ".weight" and the like.
          dtype: that of the model's activations.

        Raises:
          InputError: tensors were trained in full beside the adapters, or magnitudes (DoRA), which
            no such file holds.
        """
        refuse_others(self.values, self.layouts)
        refuse_rows(
            self.values,
            self.layouts,
            f"have no place in an {files.SUFFIX}: save the model, or an .npz",
        )
        if self.has_magnitudes:
            raise InputError(
                "onnxruntime's adapters have no magnitudes, which DoRA trains: save the model, or "
                "the adapters as an .npz or a folder of PEFT"
            )
        scale, result = self.alpha / self.rank, {}
        for name in self.layouts:
            a, b = (np.asarray(self.values[member]).swapaxes(-1, -2) for member in pair(name))
            more = [(0, 0)] * (a.ndim - 2), (0, self.rank - a.shape[-1])  # one rank for all
            a, b = np.pad(a, [*more[0], (0, 0), more[1]]), np.pad(b, [*more[0], more[1], (0, 0)])
            for member, value in zip(factor_names(name, names), (a, b * scale), strict=True):
                result[member] = np.ascontiguousarray(value.astype(dtype))
        return result

    def save(
        self,
        path: str | os.PathLike[str],
        model: Model | None = None,
        *,
        names: Callable[[str], str] | None = None,
        base_model: str | None = None,
    ) -> None:
        """Write the adapters to a small file, or to a folder as PEFT has it.

        Args:
          path: of an .npz, which has all values and what their axes mean; of an .onnx_adapter for
            `onnxruntime.LoraAdapter` and a model saved with `adapters="inputs"`; any other path is
            a folder for `adapter_model.safetensors` and `adapter_config.json`.
          model: the model of the weights, for a folder; by default that of the run. It tells what
            the modules are called in transformers, and which of them the file has in one matrix
            (qkv_proj) or apart. Each gets the ranks that reach it. PEFT ignores names that it does
            not find; a warning says if they are not certain.
          names: as in `to_inputs`, for the two latter; by default, in a folder, transformers' name,
            without the prefix of a module around the network that was exported.
          base_model: the name on the hub, or the path, of transformers' model that PEFT is to load
            (`base_model_name_or_path` of a folder). By default, of a model that was loaded from a
            folder, `_name_or_path` of its `config.json`, its name on the hub, or its path.

        Raises:
          InputError: tensors were trained in full (only .npz has them, and a folder, as
            `modules_to_save` and biases, with the model), or PEFT has no adapters for a weight, or
            its module is not known.
          OSError: the path cannot be written; a file that was there stays.
        """
        check_arguments(Adapters.save, locals())
        if os.fspath(path).endswith(files.SUFFIX):
            return files.write_onnx_adapter(path, self.to_inputs(names or module_name))
        if os.path.isdir(path) or not os.fspath(path).endswith(".npz"):
            return peft_modules.write(path, self, model or self.model, names, base_model)
        about = json.dumps(self.about).encode()
        arrays = {**self.values, _ABOUT: np.frombuffer(about, np.uint8)}
        from jaxonnx import sparse

        sparse.save(path, arrays, {}, layers=())

    @property
    def about(self) -> dict[str, Any]:
        """Rank, alpha, layouts, trained rows and checksum, as JSON has them."""
        places = {name: dataclasses.asdict(place) for name, place in self.layouts.items()}
        chosen = ((name, find_chosen(self.values, name)) for name in self.layouts)
        rows = {
            name: np.asarray(indices).tolist() for name, indices in chosen if indices is not None
        }
        about = {"rank": self.rank, "alpha": self.alpha, "layouts": places, "base": self.base}
        return about | ({"rows": rows} if rows else {})

    @classmethod
    def read(cls, about: Mapping[str, Any], inputs: Mapping[str, Any]) -> Adapters:
        """Return the adapters whose layouts `about` has, of values by the names of `to_inputs`.

        Raises:
          KeyError, TypeError, ValueError: `about` is not that of adapters, or values are missing.
        """
        places = {name: Matrix.read(entry) for name, entry in about["layouts"].items()}
        values = dict(inputs)
        for name in places:
            for factor, member in zip(pair(name), factor_names(name, module_name), strict=True):
                values[factor] = jnp.matrix_transpose(jnp.asarray(values.pop(member), jnp.float32))
            if (norms := values.pop(magnitude_name(name, module_name), None)) is not None:
                values[magnitude(name)] = jnp.asarray(norms, jnp.float32)
        for name, indices in about.get("rows", {}).items():  # which a file has as a matrix
            values[index_member(name, places[name])] = jnp.asarray(indices, jnp.int32)
        return cls(about["rank"], float(about["rank"]), places, values, about.get("base", ""))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Model | None = None,
        *,
        names: Callable[[str], str] | None = None,
    ) -> Adapters:
        """Load the adapters that `save` wrote, or those of the newest checkpoint in a folder.

        Args:
          path: an .npz, a folder of checkpoints; or an .onnx_adapter, or a folder of PEFT.
          model: whose weights the two latter change. Adapters of q_proj, k_proj and v_proj become
            one of a matrix that has these in one: their ranks add up. Those of Phi-3's gate_up_proj
            become two where gate_proj and up_proj are apart.
          names: as in `to_inputs`, beside the names in transformers; "self_attn" and "attn" count
            as one.

        Raises:
          InputError: the adapters are of another model, or of a kind that is not LoRA.
          ModelError: the file or folder holds no adapters, or is damaged.
        """
        if files.is_foreign(path):
            if model is None:
                raise InputError(f"'{os.fspath(path)}' names modules: pass the model as well")
            factors, rank, alpha, base = peft_modules.read(path, model, names)
            meanings = weights(model.graph, model.tensors)
            layouts = {
                name: weight.matrix
                for name, weight in meanings.items()
                if weight.matrix and pair(name)[0] in factors
            }
            arrays = {
                n: jnp.asarray(x, x.dtype if x.ndim == 1 else jnp.float32)
                for n, x in factors.items()
            }
            result = cls(rank, alpha, layouts, arrays, base)
            result._check(model)
            return result
        with wrap_errors(
            f"'{os.fspath(path)}' holds no adapters of jaxonnx, or is damaged", ModelError
        ):
            if os.path.isdir(path):
                from jaxonnx._io import checkpoints

                if not any(name.isdigit() for name in os.listdir(path)):  # steps of a run
                    raise files.refuse_folder(path)
                newest = checkpoints.read(path)
                values, about = newest.tensors, newest.adapters or {}
            else:
                from jaxonnx import sparse

                values, _ = sparse.load(path)
                about = json.loads(values.pop(_ABOUT).tobytes())
            places = {name: Matrix.read(entry) for name, entry in about["layouts"].items()}
            for name, value in values.items():
                factor = name.endswith((".lora_A", ".lora_B", ".lora_magnitude"))
                if (~np.isfinite(value) if factor else np.isnan(value)).any():
                    raise ValueError(f"'{name}' has values that are not finite")
            arrays = {name: jnp.asarray(value) for name, value in values.items()}
            for name, indices in about.get("rows", {}).items():  # no tensors of a checkpoint
                arrays[index_member(name, places[name])] = jnp.asarray(indices, jnp.int32)
            return cls(about["rank"], float(about["alpha"]), places, arrays, about.get("base", ""))

    def _check(self, model: Model) -> None:
        shapes = {name: w.shape for name, w in weights(model.graph, model.tensors).items()}
        expected = {name: v.shape for name, v in self.values.items()}
        for name, place in self.layouts.items():
            if name not in shapes:
                raise InputError(f"the adapters are of another model: it has no weight '{name}'")
            a, b = map(expected.pop, pair(name))
            norms = expected.pop(magnitude(name), None)
            fits = sorted(place.order) == [*range(len(shapes[name]))]
            if fits and (chosen := find_chosen(self.values, name)) is not None:
                height, width = place.sizes(shapes[name])[:: -1 if place.lookup else 1]
                width_of_rows = b[0] if len(a) == 1 else a[1]
                fits = width_of_rows == width and bool((np.asarray(chosen) < height).all())
            elif fits:
                outputs = (*np.delete(shapes[name], place.summed_axes).tolist(),)
                fits = (a, b) == place.factors(shapes[name], a[-2]) and norms in (None, outputs)
            if not fits:
                raise InputError(
                    f"the adapters are of another model: its '{name}' has shape "
                    f"{list(shapes[name])}"
                )
        check_magnitudes(model, [name for name in self.layouts if magnitude(name) in self.values])
        for name, shape in expected.items():
            if shapes.get(name) != shape:
                raise InputError(
                    f"the adapters are of another model: it has no '{name}' of shape {list(shape)}"
                )

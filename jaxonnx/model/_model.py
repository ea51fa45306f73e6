"""Model: a graph as pure functions of its parameters and state, and the models made from it."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto
from rich.console import Group

from jaxonnx._data.forms import check_size, examples_of
from jaxonnx._data.ragged import Padding
from jaxonnx._file import formats
from jaxonnx._file import save as saving
from jaxonnx._graph.bind import Graph, bind
from jaxonnx._graph.places import Places
from jaxonnx._graph.roles import graph_tensors, running_statistics
from jaxonnx._graph.values import Value, arguments, data, declared, listed, matching
from jaxonnx._rewrite.batch import freed
from jaxonnx._rewrite.head import Classes, Head, replaced
from jaxonnx._rewrite.outputs import cut
from jaxonnx._run.overlay import ratios
from jaxonnx._run.program import Program
from jaxonnx.errors import InputError
from jaxonnx.model import _notes as notes
from jaxonnx.model._calls import inputs_first, unmarked
from jaxonnx.model._predict import predictions
from jaxonnx.model._restart import Initializer, restarted
from jaxonnx.model._select import Select, select
from jaxonnx.model._show import Rendered, overview
from jaxonnx.model._sparsity import options, recorded, selected, unrecorded, with_record
from jaxonnx.model._summary import Summary, summary
from jaxonnx.training_info._run import Training

if TYPE_CHECKING:  # a model without sparse weights does not import these
    from jaxonnx._file.packed import Recorded
    from jaxonnx.sparse import SparsityPattern

Trainable = Select
Statistics = Literal["batch", "frozen"]


@dataclass(frozen=True, eq=False, repr=False)
class Model(Rendered):
    """An ONNX graph as pure functions of its parameters. A Model never changes.

    >>> from jaxonnx import demo
    >>> model = demo.model()
    >>> x = jnp.ones((2, 1, 8, 8))
    >>> model(x).shape
    (2, 10)
    >>> gradients = jax.grad(lambda params: model.apply(params, x).sum())(model.params)
    >>> gradients["14.bias"].shape
    (10,)

    Attributes:
      params: what training changes, by tensor name.
      state: running statistics and other tensors that are not trained, by name.
    """

    params: dict[str, jax.Array]
    state: dict[str, jax.Array]
    proto: ModelProto = field(repr=False)
    """The file without the data of its tensors."""
    program: Program
    originals: Mapping[str, np.ndarray]
    """64-bit tensors of the file, which the 32-bit arrays of JAX cannot hold."""
    heads: tuple[Head, ...] = ()
    """The layers that `with_head` put in the place of others."""

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the tensors of new heads (`with_head`), for `trainable` and `labels`."""
        return tuple(name for head in self.heads for name in head.tensors)

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def tensors(self) -> dict[str, Any]:
        """All named tensors: parameters, state, and constants as NumPy arrays."""
        return {**self.program.constants, **self.state, **self.params}

    @cached_property
    def _places(self) -> Places:
        """The modules and nodes of the weights, and their other names."""
        return Places(self.proto.graph, self.graph, self.tensors, self.params)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs that a call must give, in order."""
        wanted = set(self.graph.inputs)
        return tuple(declared(v) for v in self.proto.graph.input if v.name in wanted)

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs, in file order."""
        return tuple(map(declared, self.proto.graph.output))

    @cached_property
    def training(self) -> Training:
        """The training that the file itself carries (`training_info`) as pure functions."""
        return Training(self.proto, self.merged()._values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user of the model should know: about the file, and about unrolled loops."""
        return (*self._warnings, *self.program.notes)

    @cached_property
    def _warnings(self) -> tuple[str, ...]:
        return tuple(notes.warnings(self.proto.graph, self.program, self.tensors, self.outputs))

    @inputs_first
    def __call__(self, /, *inputs: Any, rng: jax.Array | None = None, **named: Any) -> Any:
        """Run inference, compiled: an array if there is one output, else a tuple in file order.

        Args:
          inputs: arrays in the order of `self.inputs`; any may be passed by name instead.
          rng: a key for random operators; without it they use `jax.random.key(0)`. Where an input
            is called "rng", the key is `rng_`.

        Raises:
          InputError: arguments that do not fit the inputs.
        """
        return _one(self.program(*self._stored, rng, self._arguments(inputs, named)))

    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        pad: Mapping[str, Any] | None = None,
        length_buckets: int | Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Run inference over any number of examples, batch by batch.

        >>> from jaxonnx import demo
        >>> demo.model().predict(np.zeros((100, 1, 8, 8), np.float32)).shape
        (100, 10)

        Args:
          data: inputs in any of the forms of data that `jaxonnx.train` takes, but for folders of
            pictures: arrays, a tuple or dict of them, the path of an .npz file, a Hugging Face
            Dataset, or batches of these. Targets beside them are left out.
          batch_size: of data in one piece; 32 if not given, or what the inputs are fixed to.
          pad: as in `jaxonnx.train`, for sequences of unequal length.
          length_buckets: as in `jaxonnx.train`.
          progress: show a bar after two seconds; by default in terminals and notebooks.

        Returns:
          A NumPy array with the examples along the first axis, in their order; if there are several
          outputs a dict of these by name.
          For sequences of unequal length, an output that has them along its second axis is a list
          of arrays, one for each example, without padding.

        Raises:
          TrainingError: data that do not fit.
          InputError: inputs that do not fit, or an output that does not have one row per example.
        """
        padding = Padding.of(pad, length_buckets)
        examples = examples_of(data, self.inputs, batch_size, None, "data", False, padding)
        check_size(examples, batch_size)
        return predictions(self, self.outputs, examples, progress)

    @cached_property
    def _stored(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.program.stored(self.params), self.program.stored(self.state)

    @inputs_first
    def apply(
        self,
        /,
        params: Mapping[str, Any],
        *inputs: Any,
        state: Mapping[str, Any] | None = None,
        rng: jax.Array | None = None,
        **named: Any,
    ) -> Any:
        """Run inference as a pure function, for `jax.jit`, `grad`, `vmap` and the like.

        BatchNormalization uses its running statistics and Dropout is inactive, whatever the file's
        training flags say. `state` replaces `self.state`, whose arrays otherwise become constants
        of a function that is compiled around this call.

        The name of an input means the input: where one is called "state", "rng" or "params", the
        argument is `state_`, `rng_` or `params_`, which also work where none is.
        """
        state = self.state if state is None else state
        values = data(self._arguments(inputs, named))
        return _one(self.program.evaluate(params, state, values, key=rng, training=False))

    @inputs_first
    def apply_train(
        self,
        /,
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        rng: jax.Array | None,
        *inputs: Any,
        **named: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Run with training semantics as a pure function; return `(outputs, new state)`.

        BatchNormalization uses the statistics of the batch and renews the running ones in the
        state; Dropout is active with its own ratio and draws from `rng`. Inputs with the names of
        these arguments are as in `apply`.
        """
        updates: dict[str, Any] = {}
        values = data(self._arguments(inputs, named))
        outputs = self.program.evaluate(
            params, state, values, key=rng, training=True, updates=updates
        )
        renewed = {name: updates.get(name, value) for name, value in state.items()}
        return _one(outputs), renewed

    def replace(
        self,
        *,
        params: Mapping[str, jax.Array] | None = None,
        state: Mapping[str, jax.Array] | None = None,
    ) -> Model:
        """Return a model with other values of the same tensors.

        Raises:
          InputError: names or shapes differ from the model's.
        """
        return dataclasses.replace(
            self,
            params=matching("params", self.params, params),
            state=matching("state", self.state, state),
        )

    def with_trainable(self, trainable: Trainable) -> Model:
        """Return a model whose parameters are exactly the chosen floating-point tensors.

        Args:
          trainable: names, regular expressions (matched in full) or wildcards ("*.query"), or a
            predicate of name and value. A name is that of a tensor, also one that Identity nodes
            give it (`jaxonnx.load`, `tied`); or, where no tensor has it, that of a module or node
            (as in `with_outputs`), for the weights that are read there. `summary` lists all three.
            Running statistics are chosen only by their exact names.

        Raises:
          InputError: a name or expression matches no floating-point tensor, module or node; the
            message has similar ones.
        """
        self._has_no_adapters("trainable")
        tensors = self.tensors
        floats = {n: v for n, v in tensors.items() if jnp.issubdtype(v.dtype, jnp.floating)}
        # a running statistic is renewed, not trained, unless it is asked for by its name
        statistics = running_statistics(self.graph)
        chosen = select(trainable, floats, "trainable", statistics, places=self._places)
        constants = {n: v for n, v in self.program.constants.items() if n not in chosen}
        return dataclasses.replace(
            self,
            params={name: jnp.asarray(tensors[name]) for name in tensors if name in chosen},
            state={n: v for n, v in tensors.items() if n not in chosen and n not in constants},
            program=dataclasses.replace(self.program, constants=constants),
        )

    def reinitialize(
        self,
        rng: jax.Array,
        names: Select,
        initializer: Initializer = jax.nn.initializers.he_normal(),  # noqa: B008
    ) -> Model:
        """Return a model in which some weights start anew: a head for other data, or all of them.

        Vectors become 0, scales 1, running means 0 and variances 1, slopes of PRelu 0.25. All else
        is drawn by the initializer, with inputs and outputs of the layer as its fans whatever the
        layout of the weight; an embedding has its columns as inputs.

        Args:
          rng: a key.
          names: tensors, modules or nodes, as in `with_trainable`, running statistics included; or
            a predicate of name and value.
          initializer: one of `jax.nn.initializers`, or any function `(key, shape, dtype)` that
            takes the axes in the order (kernel..., inputs, outputs).

        Raises:
          InputError: a name or expression matches no floating-point tensor.
        """
        self._has_no_adapters("weights")
        tensors = {**self.params, **self.state}
        constants = self.program.constants
        new = restarted(self.graph, tensors, constants, names, rng, initializer, self._places)
        params, state = ({name: new[name] for name in old} for old in (self.params, self.state))
        return self.replace(params=params, state=state)

    def with_outputs(self, outputs: str | Iterable[str]) -> Model:
        """Return a model cut at other outputs: features, or a backbone for a new head.

        Nodes, tensors and inputs that these outputs do not need are neither evaluated nor saved. A
        new head is a function, or a module of Flax, of this model's outputs.

        Args:
          outputs: names of values or nodes of the main graph, or of modules of PyTorch or scopes
            of TensorFlow as exporters record them ("layer4": the output of its last node).

        Raises:
          InputError: a name is unknown; the message has similar ones.
        """
        self._has_no_adapters("outputs")
        return self._rewritten(cut(self.proto, self.graph, self.tensors, outputs))

    def with_head(
        self,
        classes: Classes,
        at: str | None = None,
        *,
        ending: bool = False,
        rng: jax.Array | None = None,
        initializer: Initializer = jax.nn.initializers.lecun_normal(),  # noqa: B008
    ) -> Model:
        """Return a model whose last layer is a new one, for other classes.

        The last layer is the last Gemm, MatMul or convolution before the output, behind which only
        stands what keeps its outputs apart: a bias, activations, pooling over images, Flatten,
        Reshape, Squeeze and the like. Its node and its tensors keep their names, and `head` has
        those of the tensors; a tensor that other layers read as well stays with them, and one that
        is computed (behind DequantizeLinear, from a normalized weight) with what it is computed
        from. Outputs of the file that are computed from the old classes are dropped.

        >>> from jaxonnx import demo
        >>> model = demo.model().with_head(["even", "odd"])
        >>> model(jnp.ones((2, 1, 8, 8))).shape
        (2, 2)
        >>> model.head
        ('14.weight', '14.bias')

        Args:
          classes: their number, or their names, which `save` writes and `jaxonnx classify` reads.
          at: which one, where several layers could be meant: an output; or a value, node or module
            (as in `with_outputs`) of the layer itself.
          ending: keep a Softmax, LogSoftmax or Sigmoid that the graph ends in. Without it the
            output has logits, by the same name.
          rng: a key for the new weights; without it they are drawn with `jax.random.key(0)`.
          initializer: as in `reinitialize`.

        Raises:
          InputError: there is no such layer, or several could be meant: the message names them.
        """
        self._has_no_adapters("the head")
        tensors, trained = self.tensors, self.params
        new = replaced(self.proto, self.graph, tensors, trained, classes, at, ending=ending)
        fresh = {name: jnp.asarray(value) for name, value in new.tensors.items()}
        wide = {n: x for n, x in new.tensors.items() if x.dtype != fresh[n].dtype}
        constants = {n: v for n, v in self.program.constants.items() if n not in fresh}
        net = dataclasses.replace(
            self,
            params={**self.params, **fresh},
            state={name: x for name, x in self.state.items() if name not in fresh},
            program=dataclasses.replace(self.program, constants=constants),
            originals={**self.originals, **wide},
            heads=(*(h for h in self.heads if fresh.keys().isdisjoint(h.tensors)), new.head),
        )._rewritten(new.proto, new.constants)
        net = net.with_outputs(net.graph.outputs)
        statistics = running_statistics(net.graph) & fresh.keys()
        params = {name: x for name, x in net.params.items() if name not in statistics}
        state = {**net.state, **{name: fresh[name] for name in statistics}}
        net = dataclasses.replace(net, params=params, state=state)
        key = jax.random.key(0) if rng is None else rng
        return net.reinitialize(key, lambda name, _: name in fresh, initializer)

    def with_any_batch(self) -> Model:
        """Return a model for batches of any size, from a file that was exported for one.

        Targets of Reshape and zero initial states that hold the size are changed, in what `save`
        writes as well. Where the batch could be in several axes, the result is checked on random
        numbers, which runs the model three times.

        Raises:
          InputError: a node fixes the size in another way; the message names it.
        """
        self._has_no_adapters("the batch size")
        proto, added = freed(self.proto, self.program, self.params, self.state)
        if proto is self.proto:
            return self
        net = self._rewritten(proto, added)
        # what the changes leave over is dropped; an algorithm of the file may read it
        return net if proto.training_info else net.with_outputs(net.graph.outputs)

    def _rewritten(self, proto: ModelProto, added: Mapping[str, np.ndarray] | None = None) -> Model:
        """Return the model of a changed file: tensors keep their roles, new ones are constants."""
        constants = {**self.program.constants, **(added or {})}
        graph = bind(proto, proto.graph, {*self.params, *self.state, *constants})
        kept = {*graph_tensors(graph)}
        params, state, constants = (
            {name: value for name, value in group.items() if name in kept}
            for group in (self.params, self.state, constants)
        )
        program = dataclasses.replace(self.program, graph=graph, constants=constants)
        heads = tuple(head for head in self.heads if kept.issuperset(head.tensors))
        return dataclasses.replace(
            self, params=params, state=state, proto=proto, program=program, heads=heads
        )

    def with_statistics(self, statistics: Statistics) -> Model:
        """Return a model whose training uses other statistics in BatchNormalization.

        Args:
          statistics: "batch" uses those of the batch and renews the running ones, as a loaded file
            does; "frozen" uses the running ones and keeps them, while scale and bias are
            trained like all else. That suits small batches, and new data of little variety.

        Raises:
          InputError: `statistics` is neither.
        """
        if statistics not in ("batch", "frozen"):
            raise InputError(f"statistics is 'batch' or 'frozen', and was {statistics!r}")
        return self._overlaid(frozen=statistics == "frozen")

    def with_dropout(self, ratio: float | Mapping[str, float]) -> Model:
        """Return a model with other ratios of Dropout in training.

        Inference and `save` are as before. Dropout nodes of the file are active in training with
        their own ratio anyway; most exporters leave none in a file for inference.

        Args:
          ratio: of all Dropout nodes; or a ratio for each of some values, nodes or modules (as in
            `with_outputs`), behind which Dropout is put unless it is one itself.

        Raises:
          InputError: there is no Dropout node, no such value, or a ratio is not in [0, 1).
        """
        new = ratios(self.program.overlay, self.graph, self.proto.graph, ratio)
        return self._overlaid(dropout=new)

    def with_remat(self) -> Model:
        """Return a model that keeps few values for a gradient in training and recomputes the rest.

        About the square root of its nodes is kept; a step takes up to a third longer.
        """
        return self._overlaid(remat=True)

    def _overlaid(self, **changes: Any) -> Model:
        overlay = dataclasses.replace(self.program.overlay, **changes)
        return dataclasses.replace(self, program=dataclasses.replace(self.program, overlay=overlay))

    @property
    def sparsity(self) -> Recorded | None:
        """The pattern and the weights that the file records as sparse; None without a record."""
        return recorded(self.proto, self.params)

    def sparsity_options(self) -> dict[str, Any]:
        """Return what the graph says of its weights, as `exclude` and `axes` of `sparse.layers`.

        A weight that is used in anything but dense matrix products and convolutions (an embedding,
        a grouped convolution, a table that is added) cannot be sparse. The input axis is the one
        that the product sums over, at the first use of a weight that has several.
        """
        return options(self.graph, self.tensors, self.params)

    def with_sparsity(
        self,
        pattern: str | SparsityPattern | None = "2:4",
        *,
        transposable: bool = True,
        **choice: Any,
    ) -> Model:
        """Return a model with a record of what is sparse, for `save` and `sparse.verify`.

        For weights of a training loop of your own: `jaxonnx.train` records by itself. The weights
        stay as they are; `sparse.prune` makes them sparse.

        Args:
          pattern, transposable: as in `sparse.layers`; None takes the record away.
          choice: `select`, `exclude` and `axes` as in `sparse.layers`; without them the graph
            says which weights have the pattern, and along which axes (`sparsity_options`). `select`
            takes modules and nodes too, as in `with_trainable`.

        Raises:
          SparsityError: no weight is left to be sparse.
        """
        choice = self.sparsity_options() | choice
        if choice.get("select") is not None:
            choice["select"] = selected(choice["select"], self.params, self._places)
        proto = with_record(self.proto, self.params, pattern, transposable, choice)
        return dataclasses.replace(self, proto=proto)

    def to_onnx(self) -> ModelProto:
        """Return the original graph with these weights, in inference form.

        A record of sparse weights stays for those that have the pattern.
        """
        return self._written()

    def save(
        self, path: str | os.PathLike, *, external_data: bool = False, sparse: bool = False
    ) -> None:
        """Write the original graph with these weights; never leave half a file behind.

        A warning says if weights have 2:4 zeros and nothing is recorded (`sparse.record`). Sparse
        weights are written with their zeros in place, which every runtime takes and
        compilers look for (TensorRT: `trtexec --sparsity=enable`, or the builder flag
        `SPARSE_WEIGHTS`).

        Args:
          path: of the .onnx file; if it ends in .npz, the graph and the weights are written with
            the sparse ones packed, and `jaxonnx.load` unpacks them. If it ends in .safetensors,
            parameters and state are written by name, for `jaxonnx.load(..., weights=path)`.
          external_data: put the weights into a file beside it; done anyway above 2 GB.
          sparse: write the sparse weights as ONNX sparse initializers, which few runtimes take.

        Raises:
          InputError: this kind of file does not have the option.
          OSError: the path cannot be written.
          SparsityError: a packed or sparse form, but the model has no record of sparse weights.
        """
        formats.save(path, self.to_onnx, self._weights, external_data=external_data, sparse=sparse)
        if formats.of(path).graph is None or self.sparsity is not None:
            return
        if message := unrecorded(self.graph, self.tensors, self.params):
            warnings.warn(f"'{os.fspath(path)}': {message}", stacklevel=2)

    def merged(self) -> Model:
        """Return a plain model in which adapters (`jaxonnx.LoRA`) are merged into the weights.

        Its parameters are those of the model that the adapters were attached to, and what was
        trained beside them. A model without adapters is returned as it is.
        """
        adaption = self.program.adaption
        if adaption is None:
            return self
        tensors = {**self.state, **self.params}
        params = jax.jit(lambda t: {n: adaption(t)[n] for n in adaption.params})(tensors)
        state = {n: v for n, v in tensors.items() if n in self.state and n not in params}
        program = dataclasses.replace(self.program, adaption=None)
        return dataclasses.replace(self, params=params, state=state, program=program)

    def _has_no_adapters(self, what: str) -> None:
        if self.program.adaption is not None:
            raise InputError(
                f"{what} of a model with adapters cannot be changed: set it before they are "
                "attached, or merge them first with .merged()"
            )

    def _written(self, *, repeat: bool = False) -> ModelProto:
        """Return the file; `repeat` writes a parameter that equals another one a second time."""
        net = self.merged()
        names = {*net.params}, {*net.state}
        return saving.to_onnx(self.proto, net._values(), *names, repeat=repeat)

    def _weights(self) -> dict[str, np.ndarray]:
        net = self.merged()
        return {n: w for n, w in net._values().items() if n in net.params or n in net.state}

    def _values(self) -> dict[str, np.ndarray]:
        values = saving.in_file_types({**self.state, **self.params}, self.originals)
        return {**self.program.constants, **values}

    def _arguments(self, inputs: tuple, named: Mapping[str, Any]) -> dict[str, Any]:
        return arguments(self.inputs, self._defaults, inputs, unmarked(named))

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return self._defaults.union(self.graph.inputs)

    @cached_property
    def _defaults(self) -> frozenset[str]:
        """Inputs with an initializer as their default: they may be passed by name."""
        return frozenset(v.name for v in self.proto.graph.input) - set(self.graph.inputs)

    def summary(self) -> Summary:
        """Return a table of the layers: operator, output shape, parameters, what is trained, notes.

        It renders in terminals and notebooks; `.layers` has its rows.
        """
        return summary(self)

    def __repr__(self) -> str:
        signature = f"{listed(self.inputs)} -> {listed(self.outputs)}"
        return f"Model({signature}; {len(self.params)} parameters)"

    def __rich__(self) -> Group:
        return overview(self)


def _one(outputs: tuple) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs

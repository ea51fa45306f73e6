"""Model: a graph as pure functions of its parameters and state, and the models made from it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import jax
import optax
from jax.sharding import Mesh
from onnx import ModelProto
from rich.console import Group

from jaxonnx._data.forms import lacks_batch_axis
from jaxonnx._data.images.folder import list_folder
from jaxonnx._data.ragged import Padding
from jaxonnx._graph.select import Select
from jaxonnx._graph.values import arguments, data, list_values
from jaxonnx._mesh.rules import Sharding
from jaxonnx._mesh.shardings import Shardings, shardings
from jaxonnx._network import Network
from jaxonnx._rewrite.head import Classes
from jaxonnx._run.changes import CallForm
from jaxonnx._run.overlay import ratios
from jaxonnx._text import Rendered
from jaxonnx.errors import InputError
from jaxonnx.model import _transforms as transforms
from jaxonnx.model._adapters import AdapterForm, merge_adapters
from jaxonnx.model._call_arguments import inputs_first, unmark_names
from jaxonnx.model._generate import Generator, generate
from jaxonnx.model._predict import predictions, read_inputs
from jaxonnx.model._quantized import is_quantized, open_quantized
from jaxonnx.model._reinitialize import Initializer
from jaxonnx.model._save import file_values, save, to_proto
from jaxonnx.model._show import overview
from jaxonnx.model._sparsity import options, with_products, with_record
from jaxonnx.model._statistics import MOST, recompute
from jaxonnx.model._summary import Summary, summary
from jaxonnx.training_info import Training

if TYPE_CHECKING:  # a model without sparse weights does not import it
    from jaxonnx.sparse import Patterns

Trainable = Select
Statistics = Literal["batch", "frozen"]


@dataclass(frozen=True, eq=False, repr=False)
class Model(Network, Rendered):
    """An ONNX graph as pure functions of its parameters. A Model never changes.

    >>> from jaxonnx import demo
    >>> model = demo.model()
    >>> x = jax.numpy.ones((2, 1, 8, 8))
    >>> model(x).shape
    (2, 10)
    >>> gradients = jax.grad(lambda params: model.apply(params, x).sum())(model.params)
    >>> gradients["14.bias"].shape
    (10,)

    Attributes:
      params: what training changes, by tensor name.
      state: running statistics and other tensors that are not trained, by name.
    """

    @cached_property
    def training(self) -> Training:
        """The training that the file itself carries (`training_info`) as pure functions."""
        return Training(self.proto, file_values(self.merge_adapters()))

    # Calls: what the model computes.

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
        form, values = self._call_form, self._arguments(inputs, named)
        if form.reads.isdisjoint(values):
            arguments_of_form = form.params, form.state, rng, values
            return _unpack_single(self.program(*arguments_of_form, changes=form.changes))
        # the caller replaces a tensor of which another one was made
        return _unpack_single(self.program(self.params, self.state, rng, values))

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
        return _unpack_single(self.program.evaluate(params, state, values, key=rng, training=False))

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
        new_state = {name: updates.get(name, value) for name, value in state.items()}
        return _unpack_single(outputs), new_state

    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        pad: Mapping[str, Any] | None = None,
        length_buckets: int | Sequence[int] | None = None,
        preprocess: Mapping[str, Any] | None = None,
        fixed: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Run inference over any number of examples, batch by batch.

        >>> from jaxonnx import demo
        >>> demo.model().predict(jax.numpy.zeros((100, 1, 8, 8))).shape
        (100, 10)

        Args:
          data: inputs in any of the forms of data that `jaxonnx.train` takes: arrays, a tuple or
            dict of them, the path of an .npz or .jsonl file, a Hugging Face Dataset, or batches of
            these. Targets beside them are left out. Or pictures: the path of one, a list of paths,
            or a folder, for all in it and in folders below, in the order of their sorted paths.
          batch_size: of data in one piece; 32 if not given, or what the inputs are fixed to.
          pad: as in `jaxonnx.train`, for sequences of unequal length.
          length_buckets: as in `jaxonnx.train`.
          preprocess: as in `jaxonnx.train`, for folders of pictures.
          fixed: as in `jaxonnx.train`, for inputs that are the same for all examples.
          progress: show a bar after two seconds; by default in terminals and notebooks.

        Returns:
          A NumPy array with the examples along the first axis, in their order; if there are several
          outputs a dict of these by name.
          For sequences of unequal length, an output that has them along its second axis is a list
          of arrays, one for each example, without padding.

        Raises:
          TrainingError: data that do not fit.
          InputError: inputs that do not fit, a picture that cannot be read, or an output that does
            not have one row per example.
        """
        net = self.with_fixed_inputs(fixed or {})
        net = net.with_batch_axis() if lacks_batch_axis(data, net.inputs) else net
        data = list_folder(data, net, preprocess)
        return predictions(net, net, data, batch_size, Padding.of(pad, length_buckets), progress)

    def generate(
        self,
        ids: Any,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: int | Sequence[int] | None = None,
    ) -> Any:
        """Continue tokens by a decoder, through the caches of its file; compiled once.

        Args:
          ids: tokens [length], or several such: a list of them, or [batch, length]. If an encoder
            reads features (Whisper's `input_features`): [mels, frames] or [batch, mels, frames].
          max_new_tokens: their number.
          temperature: 0 takes the most likely token; above it tokens are drawn from the logits
            divided by it.
          seed: of what is drawn.
          stop: tokens that end a row; by default those of the folder that the model was loaded
            from.

        Returns:
          The tokens with their continuation, [length]; a list of such for several. A row ends with
          its token of `stop`. Of an encoder with its decoder, whose encoder reads `ids`, it is what
          the decoder writes, its first token included.

        Raises:
          InputError: the model is no decoder, or arguments that do not fit.
        """
        return generate(self._generator, ids, max_new_tokens, temperature, seed, stop)

    def _arguments(self, inputs: tuple, named: Mapping[str, Any]) -> dict[str, Any]:
        return arguments(self.inputs, self._defaults, inputs, unmark_names(named))

    @cached_property
    def _call_form(self) -> CallForm:
        with jax.ensure_compile_time_eval():  # the first call may be one that is traced
            return self.program.prepare_calls(self.params, self.state)

    @cached_property
    def _generator(self) -> Generator:
        return Generator(self)

    # Models with other values of the same tensors.

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
        return transforms.with_values(self, params, state)

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
        return transforms.with_new_values(self, rng, names, initializer)

    def recompute_statistics(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        pad: Mapping[str, Any] | None = None,
        length_buckets: int | Sequence[int] | None = None,
        preprocess: Mapping[str, Any] | None = None,
        rng: jax.Array | None = None,
    ) -> Model:
        """Return a model whose running statistics are those of training data at these weights.

        They are pooled over up to 200 batches, each of which is normalized by its own statistics as
        in training ("precise BN"; Wu and Johnson, 2021). `train` does this by itself where running
        averages cannot have settled (its argument `statistics`); after a loop of your own, or with
        new data, call it here.

        >>> from jaxonnx import demo
        >>> data = jax.random.normal(jax.random.key(0), (64, 1, 8, 8))
        >>> model = demo.model().recompute_statistics(data)

        Args:
          data: as in `predict`; shuffled, if it is sorted by class.
          batch_size: as in `predict`; best that of the training.
          pad, length_buckets, preprocess: as in `predict`.
          rng: a key for Dropout; without it masks are drawn with `jax.random.key(0)`.

        Raises:
          InputError: the model has no running statistics, or the new ones are not finite.
          TrainingError: data that do not fit.
        """
        data = list_folder(data, self, preprocess)
        examples = read_inputs(self, data, batch_size, Padding.of(pad, length_buckets))
        batches = (batch.inputs for batch in islice(examples.batches(0), MOST))
        state = recompute(self.with_statistics("batch"), batches, rng)
        return self.replace(state=state)

    # Models with another graph, or with other inputs and outputs.

    def with_outputs(self, outputs: str | Iterable[str]) -> Model:
        """Return a model cut at other outputs: features, or a backbone for a new head.

        Nodes, tensors and inputs that these outputs do not need are neither evaluated nor saved. A
        new head is a function, or a module of Flax, of this model's outputs.

        Args:
          outputs: names of values of the main graph, inputs included (a mask that a head needs),
            or of nodes, or of modules of PyTorch or scopes of TensorFlow as exporters record them
            ("layer4": the output of its last node).

        Raises:
          InputError: a name is unknown; the message has similar ones.
        """
        return transforms.with_outputs(self, outputs)

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
        >>> model(jax.numpy.ones((2, 1, 8, 8))).shape
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
        return transforms.with_new_head(self, classes, at, ending, rng, initializer)

    def then(self, function: Any, *, outputs: Sequence[str] | None = None) -> Model:
        """Return a model that goes on with a JAX function or a module of Flax.

        The nodes of the file stay as they are, those of the function follow, in what `save` writes
        as well: one file, whatever was written in JAX. The weights of a module become trained
        tensors by their path in the module.

        >>> from jaxonnx import demo
        >>> model = demo.model().then(jax.nn.softmax, outputs=["probabilities"])
        >>> model
        Model(x: float32[batch, 1, 8, 8] -> probabilities: float32[batch, 10]; 13 parameters)

        Args:
          function: of this model's outputs, in the order of the file, but for those that continue
            caches and stay behind the results; or an `nnx.Module`, or a module of linen as
            `net.bind(variables)`.
          outputs: the names of the results; "output" and the path to them by default.

        Raises:
          UnsupportedError: ONNX cannot say a primitive of the function; its line is named.
          InputError: the file's opset is older than 13, or the shape of an output depends on the
            values of inputs and is not declared, or a name is taken.
        """
        return transforms.append_jax(self, function, outputs)

    def without_cache(self) -> Model:
        """Return a model of whole sequences, from a decoder whose inputs and outputs have caches.

        Caches (keys and values, states of convolutions) are found by the graph: inputs that an
        output continues. They are empty in each call, and neither inputs nor outputs; they may
        still be passed by name. A switch that chooses a branch for them is off. The file stays as
        it is, so that `save` writes the decoder with its caches. `jaxonnx.train` does this by
        itself. A model without caches is returned as it is.
        """
        return transforms.without_cache(self)

    def with_fixed_inputs(self, values: Mapping[str, Any]) -> Model:
        """Return a model without some inputs, which have one value in each call.

        >>> from jaxonnx import demo
        >>> demo.model().with_fixed_inputs({"x": jax.numpy.zeros((2, 1, 8, 8))})().shape
        (2, 10)

        The file stays as it is, so that `save` writes all inputs. What shapes depend on (a number
        of steps, an axis) is known to the compiler in this way.

        Args:
          values: numbers or arrays by input name. What has one axis less than an input whose first
            axis is open is repeated for each example.

        Raises:
          InputError: there is no such input, or a value does not fit it.
        """
        return transforms.with_fixed_inputs(self, values)

    def with_batch_axis(self) -> Model:
        """Return a model of batches, from a file for one example, whose inputs have no batch.

        Each call is a `jax.vmap` of the file over a new first axis of all inputs and outputs. The
        file stays as it is, so that `save` writes the one for one example. `jaxonnx.train`,
        `evaluate` and `predict` do this by themselves where data have one axis more than the
        inputs.
        """
        return transforms.with_batch_axis(self)

    def with_any_batch(self) -> Model:
        """Return a model for batches of any size, from a file that was exported for one.

        Targets of Reshape and zero initial states that hold the size are changed, in what `save`
        writes as well. Where the batch could be in several axes, the result is checked on random
        numbers, which runs the model three times.

        Raises:
          InputError: a node fixes the size in another way; the message names it.
        """
        return transforms.with_any_batch(self)

    # Models that are trained in another way.

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
        return transforms.with_params(self, trainable)

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

    # Models whose weights have another form.

    def sparsity_options(self) -> dict[str, Any]:
        """Return what the graph says of its weights, as `exclude` and `axes` of `sparse.layers`.

        A weight that is used in anything but dense matrix products and convolutions (an embedding,
        a grouped convolution, a table that is added) cannot be sparse. The input axis is the one
        that the product sums over, at the first use of a weight that has several.
        """
        return options(self.graph, self.tensors, self.params)

    def with_sparsity(
        self,
        pattern: Patterns | None = "2:4",
        *,
        transposable: bool = True,
        method: str = "",
        **choice: Any,
    ) -> Model:
        """Return a model with a record of what is sparse, for `save` and `sparse.verify`.

        For weights of a training loop of your own: `jaxonnx.train` records by itself. The weights
        stay as they are; `sparse.prune` makes them sparse.

        Args:
          pattern, transposable: as in `sparse.layers`; None takes the record away. Patterns by name
            take modules and nodes too, as in `with_trainable`.
          method: how the weights were trained, for the record.
          choice: `select`, `exclude` and `axes` as in `sparse.layers`; without them the graph
            says which weights have the pattern, and along which axes (`sparsity_options`). `select`
            takes modules and nodes too, as in `with_trainable`.

        Raises:
          SparsityError: no weight is left to be sparse.
        """
        return with_record(self, pattern, transposable, method, choice)

    def with_sparse_products(self) -> Model:
        """Return a model whose calls leave out the zeros of the weights that it records as 2:4.

        `model(x)`, `apply`, `predict`, `evaluate` and what else infers use the kernels of
        `sparse.sparse_products`; training and files are as before. Where the platform has none, or
        no compiler for it, products stay dense, and a warning says so.

        Raises:
          SparsityError: the model records no weights that are 2:4 (`sparse.record`).
        """
        return with_products(self)

    def with_float_weights(self) -> Model:
        """Return a quantized model with its weights as parameters in front of their rounding.

        Training with `quantize=` starts from this. Calls compute the same, and `save` writes the
        file as it was, with the integers of changed weights. Another model is returned as it is.
        """
        return open_quantized(self)[0] if is_quantized(self) else self

    def merge_adapters(self, *, requantize: bool = False) -> Model:
        """Return a plain model in which adapters (`jaxonnx.LoRA`) are merged into the weights.

        Its parameters are those of the model that the adapters were attached to, and what was
        trained beside them. A model without adapters is returned as it is.

        Args:
          requantize: round weights in few bits anew, in the types and blocks that they have; all
            other tensors stay bit for bit. Each block takes the scale that loses least: its own,
            one for its new range, or either refined by least squares. What a step of the grid is
            larger than is lost all the same: a warning has the relative errors, the worst first.

        Raises:
          InputError: weights are in few bits, and `requantize` is off; or they are dequantized in
            several ways, or by an operator for which they cannot be rounded.
        """
        return merge_adapters(self, requantize=requantize)

    # Files.

    def to_onnx(self, *, adapters: AdapterForm | None = None) -> ModelProto:
        """Return the original graph with these weights, in inference form.

        Weights of a quantized model are integers in it. A record of sparse weights stays for those
        that have the pattern.

        Args:
          adapters: as in `save`.
        """
        return to_proto(self, adapters)

    def save(
        self,
        path: str | os.PathLike,
        *,
        external_data: bool = False,
        sparse: bool = False,
        adapters: AdapterForm | None = None,
    ) -> None:
        """Write the original graph with these weights; never leave half a file behind.

        A warning says if weights have 2:4 zeros and nothing is recorded (`sparse.record`). Sparse
        weights are written with their zeros in place, which every runtime takes and
        compilers look for (TensorRT: `trtexec --sparsity=enable`, or the builder flag
        `SPARSE_WEIGHTS`).

        Args:
          path: of the .onnx file; if it ends in .npz, the graph and the weights are written with
            the sparse ones packed, and `jaxonnx.load` unpacks them. If it ends in .safetensors,
            parameters and state are written by name, for `jaxonnx.load(..., weights=path)`. Of a
            model that was loaded from a folder it may be a folder, one that exists or with a slash
            at the end: configuration, tokenizer and all that is not weights are copied, so that
            the runtime of the old folder runs the new one.
          external_data: put the weights into a file beside it; done anyway above 2 GB.
          sparse: write the sparse weights as ONNX sparse initializers, which few runtimes take.
          adapters: how those of `jaxonnx.LoRA` are written. "merged": into the weights. "nodes":
            the weights stay bit for bit, and two small products and a sum stand behind each.
            "inputs": the same with A and B as optional inputs of any rank, by default empty, so
            that the file is the base; onnxruntime sets them from an .onnx_adapter
            (`Adapters.save`). By default "nodes" if weights are stored in few bits, else "merged",
            which rounds weights in few bits as `merge_adapters(requantize=True)` does.

        Raises:
          InputError: this kind of file does not have the option, or adapters cannot be written
            so; or the path is a folder, and the model was not loaded from one.
          OSError: the path cannot be written.
          SparsityError: a packed or sparse form, but the model has no record of sparse weights.
        """
        save(self, path, external_data=external_data, sparse=sparse, adapters=adapters)

    # Tables.

    def summary(self) -> Summary:
        """Return a table of the layers: operator, output shape, parameters, what is trained, notes.

        It renders in terminals and notebooks; `.layers` has its rows.
        """
        return summary(self)

    def shardings(
        self,
        mesh: Mesh | Literal["all"],
        sharding: Sharding = "data",
        *,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Shardings:
        """Return where each tensor would lie on a mesh, as a table; nothing is moved.

        >>> from jaxonnx import demo
        >>> table = demo.model().shardings("all", "fsdp")
        >>> table.specs["14.bias"]
        P()

        Args:
          mesh, sharding: as in `jaxonnx.train`.
          optimizer: whose state counts, too; that of Adam by default, two numbers a parameter.

        Raises:
          InputError: a rule that fits no tensor, an axis that the devices do not divide, a name
            that the mesh does not have.
        """
        return shardings(self, mesh, sharding, optimizer)

    def __repr__(self) -> str:
        signature = f"{list_values(self.inputs)} -> {list_values(self.outputs)}"
        return f"Model({signature}; {len(self.params)} parameters)"

    def __rich__(self) -> Group:
        return overview(self)


def _unpack_single(outputs: tuple) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs

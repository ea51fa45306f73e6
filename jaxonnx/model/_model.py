"""`Model`: a graph as pure functions of its parameters and state."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import jax
import optax
from jax.sharding import Mesh
from onnx import ModelProto
from rich.console import Group

from jaxonnx._data.batches import iterate_inputs
from jaxonnx._data.kinds import open_data
from jaxonnx._data.ragged import Padding
from jaxonnx._display import Printable, format_count
from jaxonnx._graph.select import Select
from jaxonnx._graph.values import arguments, data, list_values
from jaxonnx._mesh.rules import Sharding
from jaxonnx._mesh.shardings import Shardings, shardings
from jaxonnx._require import check_arguments, require
from jaxonnx._rewrite import network
from jaxonnx._rewrite.head import Classes
from jaxonnx._rewrite.network import Network, enter, leave
from jaxonnx._run.call_form import CallForm, prepare_calls
from jaxonnx._run.failures import FOREIGN
from jaxonnx._run.program import Program
from jaxonnx.errors import Error, InputError
from jaxonnx.llm import Generator, Sampling, Tokenizer, add_tokens, generate, without_cache
from jaxonnx.model import _transforms as transforms
from jaxonnx.model._predict import (
    check_tensors,
    inputs_first,
    predictions,
    read_inputs,
    signature,
    unmark_names,
)
from jaxonnx.model._save import AdapterForm, merge, save, to_proto
from jaxonnx.model._show import Summary, describe_file, overview, summary
from jaxonnx.model._sparsity import options, with_products, with_record
from jaxonnx.model._statistics import MOST, recompute
from jaxonnx.model._transforms import Initializer, fit_to_batch, inputs_alone
from jaxonnx.quantization import Rounding, Sensitivity, is_quantized, open_quantized
from jaxonnx.training_info import Training
from jaxonnx.views import Dropout, FrozenStatistics, Remat, drop

if TYPE_CHECKING:  # a model without sparse weights does not import it
    from jaxonnx.sparse import Patterns

Trainable = Select


@dataclass(frozen=True, eq=False, repr=False)
class Model(Network, Printable):
    """An ONNX graph as pure functions of its parameters. A Model is immutable.

    >>> from jaxonnx import demo
    >>> model = demo.model()
    >>> x = jax.numpy.ones((2, 1, 8, 8))
    >>> model(x).shape
    (2, 10)
    >>> gradients = jax.grad(lambda params: model.apply(params, x).sum())(model.params)
    >>> gradients["14.bias"].shape
    (10,)

    Attributes:
      params: the arrays that training changes, by tensor name.
      state: running statistics and other tensors that are not trained, by tensor name.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle file, tensors and views; the graph is bound again, and compiled when called."""
        values = {field.name: getattr(self, field.name) for field in fields(Network)}
        about = {f.name: getattr(self.program, f.name) for f in fields(self.program)}
        del values["program"], about["base"]
        return _unpickle, (values, about)

    @cached_property
    def training(self) -> Training:
        """The `training_info` of the file as pure functions `init` and `step`."""
        return Training(self.proto, merge(self)._file_values)

    @property
    def sensitivity(self) -> Sensitivity | None:
        """The errors by which `jaxonnx.quantize(max_loss=)` chose types, and its trials."""
        rounding = self.program.find(Rounding)
        return None if rounding is None else rounding.report

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the file, and about loops that were unrolled."""
        return (*self._file_warnings, *self.program.notes)

    @cached_property
    def _file_warnings(self) -> tuple[str, ...]:
        return (*describe_file(self),)

    # Calls: what the model computes.

    @inputs_first
    def __call__(self, /, *inputs: Any, rng: jax.Array | None = None, **named: Any) -> Any:
        """Run inference, compiled; return an array, or a tuple if there are several outputs.

        Outputs are in the order of the file.

        Args:
          inputs: arrays in the order of `self.inputs`. Each may be passed by name instead.
          rng: a key for random operators; by default `jax.random.key(0)`. If an input is called
            "rng", pass the key as `rng_`.

        Raises:
          InputError: the arguments do not fit the inputs.
        """
        if rng is not None:
            check_arguments(Model.__call__, {"rng": rng})
        form, key = self._call_form, None if named or rng is not None else signature(inputs)
        if checked := self._checked_calls.get(key):
            try:
                return _unpack_single(checked(form.params, form.state, inputs))
            except (*FOREIGN, Error):
                # what follows repeats the call and explains its error, as do other threads
                self._checked_calls.pop(key, None)
        values = self._arguments(inputs, named)
        if form.reads.isdisjoint(values):
            outputs = self.program(form.params, form.state, rng, values, changes=form.changes)
            # the values of an array that was converted were checked, too
            repeats = key is not None and all(map(operator.is_, inputs, values.values()))
            if repeats and (compiled := self.program.find_compiled(form.changes, values)):
                self._checked_calls[key] = compiled
            return _unpack_single(outputs)
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
        """Run inference as a pure function, for `jax.jit`, `jax.grad`, `jax.vmap` and others.

        BatchNormalization uses its running statistics and Dropout is inactive, regardless of the
        training flags in the file.

        Args:
          params: the parameters, like `self.params`.
          inputs: arrays in the order of `self.inputs`. Each may be passed by name instead.
          state: replaces `self.state`. Without it, the arrays of `self.state` are constants of a
            function that is compiled around this call.
          rng: a key for random operators; by default `jax.random.key(0)`.

        If an input is called "params", "state" or "rng", this name means the input. Pass the
        argument as `params_`, `state_` or `rng_`, which works for all models.

        Raises:
          InputError: the arguments do not fit the inputs, or `params` has other names or dtypes
            than the model's.
        """
        check_arguments(Model.apply, locals())
        state = self.state if state is None else state
        check_tensors(params, state, self._dtypes)
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
        """Run in training mode as a pure function; return `(outputs, new_state)`.

        BatchNormalization uses the statistics of the batch and updates the running statistics in
        `new_state`. Dropout is active with its own ratio and draws from `rng`. Inputs with the
        names of these arguments are passed as in `apply`.
        """
        check_arguments(Model.apply_train, locals())
        updates: dict[str, Any] = {}
        check_tensors(params, state, self._dtypes)
        values = data(self._arguments(inputs, named))
        outputs = self.program.evaluate(
            params, state, values, key=rng, training=True, updates=updates
        )
        new_state = {name: updates.get(name, value) for name, value in state.items()}
        return _unpack_single(outputs), new_state

    def function(self) -> Callable[..., Any]:
        """Return the model as a pure function of its inputs alone, for use in a JAX program.

        It is `apply` with these parameters and this state, which are constants of a program that is
        compiled around it; `jaxonnx.to_onnx` names them as in the file.

        >>> from jaxonnx import demo
        >>> f = demo.model().function()
        >>> jax.jit(jax.grad(lambda x: f(x).max()))(jax.numpy.ones((2, 1, 8, 8))).shape
        (2, 1, 8, 8)
        """
        return partial(self.apply, self.params)

    def name_outputs(self, outputs: Any) -> dict[str, Any]:
        """Return the outputs of a call by their names, as a dict in the order of the file.

        It takes what the model itself, `apply` or `apply_train` returned, also while these are
        traced.

        >>> from jaxonnx import demo
        >>> model = demo.model()
        >>> [*model.name_outputs(model(jax.numpy.ones((2, 1, 8, 8))))]
        ['logits']

        Args:
          outputs: one array, or a tuple if the model has several outputs.

        Raises:
          InputError: there are more or fewer than the model has.
        """
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        names = [value.name for value in self.outputs]
        fits = len(values) == len(names)
        require("outputs", outputs, fits, f"what a call returns: {list_values(self.outputs)}")
        return dict(zip(names, values, strict=True))

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
        """Run inference over a data set, batch by batch.

        >>> from jaxonnx import demo
        >>> demo.model().predict(jax.numpy.zeros((100, 1, 8, 8))).shape
        (100, 10)

        Args:
          data: inputs in any form that `jaxonnx.train` accepts: arrays, a tuple or dict of arrays,
            the path of an .npz or .jsonl file, a Hugging Face Dataset, or an iterable of batches.
            Targets are ignored. Recurrent states that it lacks start at zeros, and outputs that
            continue them are left out. Or images: a path, a list of paths, or a folder, which is
            searched recursively, in sorted order. Or, for a model that scores whole texts, rows of
            texts or of pairs of them, like [{"text": "..."}]. Inputs of strings are arrays or
            lists.
          batch_size: the number of examples per batch; defaults to 32, or to the batch size that
            the file fixes. Iterables have batches of their own.
          pad: as in `jaxonnx.train`, for sequences of unequal length.
          length_buckets: as in `jaxonnx.train`.
          preprocess: as in `jaxonnx.train`, for images and texts.
          fixed: as in `jaxonnx.train`, for inputs that are the same for all examples.
          progress: whether to show a progress bar after two seconds; by default in terminals and
            notebooks.

        Returns:
          A NumPy array with the examples along the first axis, in order; for several outputs a dict
          of arrays by name. For sequences of unequal length, an output with the sequence along its
          second axis is a list of arrays without padding, one per example.

        Raises:
          TrainingError: the data have an unsupported form.
          InputError: the inputs do not fit, an image cannot be read, or an output does not have one
            row per example.
        """
        check_arguments(Model.predict, locals())
        net = self.with_fixed_inputs({} if fixed is None else fixed)
        opened = open_data(data, labels=False)
        net, _ = fit_to_batch(net, inputs_alone(net, opened.first_batch))
        examples = read_inputs(
            net,
            opened,
            padding=Padding.of(pad, length_buckets),
            batch_size=batch_size,
            preprocess=preprocess,
        )
        return predictions(net, net, examples, progress)

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int,
        temperature: float | None = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int = 0,
        stop: int | str | Sequence[int | str] | None = None,
        stream: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        decoder_prompt: Sequence[int] | None = None,
    ) -> Any:
        """Generate tokens or text with a decoder, using the key-value caches of its file.

        The next token is by default the most likely one. The settings of sampling are those of
        transformers, in its order: `repetition_penalty`, `temperature`, `top_k`, `top_p`, `min_p`.

        Args:
          prompts: a text; a list of messages, dicts with a role and content, which the chat
            template of the model's folder writes, and of which a last one of the assistant is
            continued; or tokens, [length]. Or a list of such prompts,
            whose lengths may differ, or tokens [batch, length]. For an encoder of features
            (`input_features` of Whisper): [mels, frames] or [batch, mels, frames].
          max_new_tokens: the maximum number of tokens to generate.
          temperature: the logits are divided by it, and a token is drawn from them; 0 takes the
            most likely token. None takes this and the next four arguments, where they are None too,
            from the search settings of `genai_config.json` in the model's folder, or else from
            `generation_config.json`; other values read neither. A warning names settings there
            that would change what is generated and have no counterpart here. `sequence_bias`,
            `forced_eos_token_id`, `bad_words_ids` of several tokens and `stop_strings` there have
            the effect that they have in transformers.
          top_k: draw from so many of the most likely tokens.
          top_p: draw from the fewest most likely tokens that have this probability together.
          min_p: draw from tokens with at least this fraction of the probability of the most likely
            one.
          repetition_penalty: divide positive logits of tokens that the prompt or the continuation
            has by it, and multiply negative ones; this also applies at temperature 0. Tokens of an
            encoder have no penalty, as in transformers: the prompt is then that of the decoder.
          seed: the random seed for sampling.
          stop: tokens or texts that end a sequence; by default the tokens that `genai_config.json`
            in the model's folder names, or else `generation_config.json`, or else `config.json`.
            Tokens replace these (and `stop_strings`), texts do not, and [] is none.
          stream: whether to return an iterator of the pieces of the text, for one prompt.
          chat_template_kwargs: other variables of the chat template, like "tools" and
            "enable_thinking", and arguments of `tokenizer.apply_chat_template`: "chat_template",
            the name of a template, and "continue_final_message". A warning names those that the
            template does not read.
          decoder_prompt: for an encoder-decoder, the first tokens of the decoder, like Whisper's
            start, language, task and no timestamps. By default those that `generation_config.json`
            in the model's folder, or else `config.json`, says, as in transformers. A language that
            it leaves open is detected for each prompt.

        Returns:
          For a text or messages the text behind them, without the token or text that ends it; with
          the tokens that the tokenizer calls special, if there are others. For tokens the prompt
          followed by the generated tokens, [length], with the token that ends them or completes a
          text of `stop`. A list of these for several prompts. A sequence also ends with the model's
          last position, of which a warning tells. For an encoder-decoder, which encodes the
          prompts, the tokens of the decoder, beginning with its first ones. Tokens that the folder
          suppresses (`suppress_tokens`, `begin_suppress_tokens`, words of one token of
          `bad_words_ids`) are not generated.

          Pieces of a stream are of whole characters; text that may begin a text of `stop` is held
          back.

        Raises:
          InputError: the model is not a decoder, or an argument does not fit.
          TrainingError: a text or messages, and the folder has no tokenizer or chat template.
        """
        check_arguments(Model.generate, locals())
        sampling = Sampling.of(
            self.folder,
            temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        return generate(
            self,
            prompts,
            max_new_tokens,
            sampling,
            seed,
            stop,
            stream,
            chat_template_kwargs,
            decoder_prompt,
        )

    def _arguments(self, inputs: tuple, named: Mapping[str, Any]) -> dict[str, Any]:
        return arguments(self.inputs, self._defaults, inputs, unmark_names(named))

    @cached_property
    def _checked_calls(self) -> dict[tuple | None, Callable]:
        """The compiled functions of past calls of arrays, by the signature of their inputs."""
        return {}

    @cached_property
    def _dtypes(self) -> dict[str, Any]:
        """The dtypes of parameters and state, by name."""
        return {name: x.dtype for name, x in (self.state | self.params).items()}

    @cached_property
    def _call_form(self) -> CallForm:
        with jax.ensure_compile_time_eval():  # the first call may be one that is traced
            return prepare_calls(self.program, self.params, self.state)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template of the folder that the model was loaded from.

        `encode(text)` returns tokens, int64[n], with the begin token where there is one;
        `decode(tokens)` returns text; `apply_chat_template(messages, add_generation_prompt=True)`
        returns the tokens of a prompt for `generate`, or the text with `tokenize=False`. These are
        the tokens that `train` and `generate` use. It needs the extra `text`.
        """
        if self.folder is None:
            raise InputError(
                "the model has no tokenizer, as it was not loaded from a folder with one: "
                "jaxonnx.load('folder/')"
            )
        return Tokenizer(self.folder)

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
        """Return a model with new values of parameters or state.

        Raises:
          InputError: names, shapes or dtypes differ from those of the model.
        """
        check_arguments(Model.replace, locals())
        return transforms.with_values(self, params, state)

    def reinitialize(
        self,
        rng: jax.Array,
        names: Select,
        initializer: Initializer = jax.nn.initializers.he_normal(),  # noqa: B008
    ) -> Model:
        """Return a model with new random values for some weights.

        Vectors are set to 0, scales to 1, running means to 0, running variances to 1 and slopes of
        PRelu to 0.25. All other weights are drawn with the initializer, with the inputs and outputs
        of the layer as fan-in and fan-out, whatever the layout of the weight. For an embedding, the
        columns are the inputs.

        Args:
          rng: a key.
          names: tensors, modules or nodes, as in `with_trainable`, or a predicate of name and
            value. Running statistics may be among them.
          initializer: one of `jax.nn.initializers`, or any function `(key, shape, dtype)` for a
            shape (kernel..., inputs, outputs).

        Raises:
          InputError: a name or expression matches no floating-point tensor.
        """
        check_arguments(Model.reinitialize, locals())
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
        """Return a model with the running statistics of BatchNormalization recomputed from data.

        The statistics are pooled over up to 200 batches, each normalized by its own statistics as
        in training ("precise BatchNorm", Wu and Johnson, 2021, arXiv:2105.07576). `train` does this
        at the end of short runs (see its argument `statistics`). Call it after a training loop of
        your own, or for new data.

        >>> from jaxonnx import demo
        >>> data = jax.random.normal(jax.random.key(0), (64, 1, 8, 8))
        >>> model = demo.model().recompute_statistics(data)

        Args:
          data: as in `predict`. Shuffle it if it is sorted by class.
          batch_size: as in `predict`; preferably that of the training.
          pad, length_buckets, preprocess: as in `predict`.
          rng: a key for Dropout; by default `jax.random.key(0)`.

        Raises:
          InputError: the model has no running statistics, or the new ones are not finite.
          TrainingError: the data have an unsupported form.
        """
        check_arguments(Model.recompute_statistics, locals())
        opened = open_data(data, labels=False)
        batch = inputs_alone(self, opened.first_batch)
        net, _ = fit_to_batch(self, batch, renews_statistics=True)
        examples = read_inputs(
            net,
            opened,
            padding=Padding.of(pad, length_buckets),
            batch_size=batch_size,
            preprocess=preprocess,
        )
        batches = iterate_inputs(islice(examples.batches(0), MOST), net.inputs)
        state = recompute(net.with_statistics("batch"), batches, rng)
        return self.replace(state=state)

    # Models with another graph, or with other inputs and outputs.

    def with_outputs(self, outputs: str | Iterable[str]) -> Model:
        """Return a model with other outputs, such as the features before the last layer.

        Nodes, tensors and inputs that these outputs do not need are removed, also from the saved
        file.

        Args:
          outputs: names of values of the main graph (inputs included), of nodes, or of modules of
            PyTorch or scopes of TensorFlow as exporters record them. A node or module means the
            output of its last node, like "layer4".

        Raises:
          InputError: a name is unknown; the message suggests similar ones.
        """
        check_arguments(Model.with_outputs, locals())
        return network.with_outputs(self, outputs)

    def with_inputs(self, inputs: str | Iterable[str]) -> Model:
        """Return a model that begins at other values, such as the features before the last layer.

        It takes these values in the order of `inputs`. Nodes and tensors that it does not need are
        removed, also from the saved file.

        >>> from jaxonnx import demo
        >>> tail = demo.model().with_inputs("13")
        >>> tail(jax.numpy.ones((2, 64))).shape
        (2, 10)

        Args:
          inputs: names of values of the main graph, nodes or modules, as in `with_outputs`. If the
            outputs depend on inputs of the file, too, these are named as well.

        Raises:
          InputError: a name is unknown; the message suggests similar ones. Or the outputs do not
            depend on a value, or depend on inputs that are not named; the message lists them.
        """
        check_arguments(Model.with_inputs, locals())
        return network.with_inputs(self, inputs)

    def split(self, values: str | Iterable[str]) -> tuple[Model, Model]:
        """Split a model in two: `head`, which ends at values, and `tail`, which begins at them.

        `tail(*head(x))` is what the model gives; for a single value, `tail(head(x))`. Each part has
        the parameters and state that it reads, and is saved as a file of its own.

        >>> from jaxonnx import demo
        >>> head, tail = demo.model().split("13")
        >>> tail(head(jax.numpy.ones((2, 1, 8, 8)))).shape
        (2, 10)

        Args:
          values: as `inputs` in `with_inputs`. An input of the file among them is passed through by
            the head.

        Raises:
          InputError: as in `with_inputs`.
        """
        check_arguments(Model.split, locals())
        values = [values] if isinstance(values, str) else [*values]
        return self.with_outputs(values), self.with_inputs(values)

    def with_head(
        self,
        classes: Classes,
        at: str | None = None,
        *,
        ending: bool = False,
        rng: jax.Array | None = None,
        initializer: Initializer = jax.nn.initializers.lecun_normal(),  # noqa: B008
    ) -> Model:
        """Return a model with a new last layer for other classes.

        The last layer is the last Gemm, MatMul or convolution before an output. Only operators that
        keep classes separate may follow it: a bias, activations, pooling over images, the choice of
        a token, Flatten, Reshape, Squeeze and the like. Its node and tensors keep their names;
        `head` lists the tensors. A tensor that other layers also read stays with them. A weight
        that is computed (by DequantizeLinear, or by weight normalization) is replaced together with
        the nodes that compute it. Outputs that are computed from the old classes are removed.

        >>> from jaxonnx import demo
        >>> model = demo.model().with_head(["even", "odd"])
        >>> model(jax.numpy.ones((2, 1, 8, 8))).shape
        (2, 2)
        >>> model.head
        ('14.weight', '14.bias')

        Args:
          classes: the number of classes, or their names, which `save` writes and `jaxonnx classify`
            reads.
          at: which layer, if there are several candidates: an output; or a value, node or module
            (as in `with_outputs`) of the layer itself.
          ending: keep a Softmax, LogSoftmax or Sigmoid at the end of the graph. By default it is
            removed, and the output has logits under the same name.
          rng: a key for the new weights; by default `jax.random.key(0)`.
          initializer: as in `reinitialize`.

        Raises:
          InputError: there is no such layer, or there are several candidates; the message lists
            them.
        """
        check_arguments(Model.with_head, locals())
        return transforms.with_new_head(self, classes, at, ending, rng, initializer)

    def with_tokens(self, tokens: str | Sequence[str], *, special_tokens: bool = False) -> Model:
        """Return a language model with more tokens, in its tokenizer and in its vocabulary.

        Each token gets a row of the embedding and an output of the output layer, tied to it or not,
        and of its bias. They start at the mean of those of the tokens that there are, up to
        rounding what `resize_token_embeddings` of transformers does by default (Hewitt,
        "Initializing New Word Embeddings for Pretrained Language Models", 2021). Rows without a
        token, by which vocabularies are often padded, are used first. `train`, `generate` and
        `save` use the new tokenizer, and a saved folder has it, with `vocab_size` in `config.json`
        and `genai_config.json`.

        `train(..., lora=)` trains the new rows beside the adapters, and no other rows; without
        adapters all rows are trained. Rows in few bits (GatherBlockQuantized, MatMulNBits) are
        rounded; what is trained of them is saved beside them, like an adapter.

        Args:
          tokens: their texts. The rows of texts that are tokens already stay as they are, and
            `lora=` trains them with the others: so do those that an earlier call added to a folder
            that was saved and loaded again. A warning names them. Tokens of the tokenizer beyond
            the table, for which a network was never resized, get their rows, too.
          special_tokens: whether they are no text, as end tokens are, so that
            `decode(..., skip_special_tokens=True)` of other tokenizers leaves them out.

        Raises:
          InputError: a text is empty or comes twice; the model was not loaded from a folder; there
            is no embedding; the embedding or the output layer is quantized in another form, or is
            computed in a way that is not known; or the model has adapters.
          TrainingError: the folder has no tokenizer.json.
        """
        check_arguments(Model.with_tokens, locals())
        listed = [tokens] if isinstance(tokens, str) else [*tokens]
        return add_tokens(self, self.tokenizer, listed, special_tokens)

    def then(
        self, function: Any, *, outputs: Sequence[str] | None = None, check: bool = True
    ) -> Model:
        """Return a model followed by a JAX function, a Flax module or another model.

        The saved file has the nodes of the model, followed by the nodes of the function. The
        weights of a module become parameters, named by their path in the module. Another model
        keeps its nodes, and its parameters, state and constants keep their names, with a number
        behind those that this model has, too ("weight_2").

        >>> from jaxonnx import demo
        >>> model = demo.model().then(jax.nn.softmax, outputs=["probabilities"])
        >>> model
        Model(x: float32[batch, 1, 8, 8] -> probabilities: float32[batch, 10]; 13 trained tensors)

        Args:
          function: a function of the outputs of this model, in file order; an `nnx.Module`; a
            linen module as `net.bind(variables)`; or a `Model` of the same opset. Outputs that
            continue caches are not passed to it and stay outputs, after the results.
          outputs: the names of the results; by default "output" followed by their path, and those
            of another model.
          check: compare the file of both on random inputs with the model's file followed by the
            function itself, by onnxruntime where it is installed. A warning says so where this is
            not possible.

        Raises:
          ModelError: `check` finds a difference; the message names the first node that differs.
          UnsupportedError: a primitive of the function cannot be expressed in ONNX; the message has
            its source line.
          InputError: the opset of the file is below 13; or the shape of an output depends on values
            of inputs and is not declared; or a name is already used. Of another model: its inputs
            do not fit, its opset differs (`jaxonnx.convert(model, opset=...)`), or it has views,
            such as fixed inputs.
        """
        check_arguments(Model.then, locals())
        return transforms.append_jax(self, function, outputs, check)

    def without_cache(self) -> Model:
        """Return a model of whole sequences, from a decoder with caches as inputs and outputs.

        A cache (keys and values, or the state of a convolution) is an input that an output
        continues. Caches are empty in each call and are no longer inputs and outputs; they may
        still be passed by name. An input that switches them on is off. `save` writes the original
        decoder with its caches. `jaxonnx.train` calls this itself. A model without caches is
        returned unchanged.
        """
        return without_cache(self)

    def with_fixed_inputs(self, values: Mapping[str, Any]) -> Model:
        """Return a model in which some inputs have fixed values and are not passed.

        >>> from jaxonnx import demo
        >>> demo.model().with_fixed_inputs({"x": jax.numpy.zeros((2, 1, 8, 8))})().shape
        (2, 10)

        Fixed values are known at compile time, which is required for inputs that determine shapes,
        such as a number of steps or an axis. `save` writes the original file with all inputs.

        Args:
          values: numbers or arrays by input name. If the first axis of an input is open, a value
            with one axis less is repeated for each example.

        Raises:
          InputError: there is no such input, or a value does not fit it.
        """
        check_arguments(Model.with_fixed_inputs, locals())
        return transforms.with_fixed_inputs(self, values)

    def with_batch_axis(self) -> Model:
        """Return a model for batches, from a file whose inputs are a single example.

        Calls are a `jax.vmap` over a new first axis of all inputs and outputs. `save` writes the
        original file for one example. Functions of data, such as `jaxonnx.train`, `predict` and
        `jaxonnx.quantize`, call this if the data have one axis more than the inputs.

        Raises:
          InputError: the model has no inputs, because all of them have fixed values.
        """
        return transforms.with_batch_axis(self)

    def with_any_batch(self) -> Model:
        """Return a model for batches of any size, from a file that was exported for one size.

        A file may also declare any batch and run with one example alone, because the exporter wrote
        the batch of its example into nodes. Heights, widths and lengths may be open as well. The
        size is replaced in the targets of Reshape, in zero initial states and, in a file for one
        example, in rows and indices of examples, also in the saved file. Unless the network draws
        random numbers, the result is verified on random inputs: two batches in one must give what
        each gives alone, up to rounding (with dynamic quantization, a tenth).

        Raises:
          InputError: a node fixes the size in another way, or mixes the examples of a batch, as a
            Softmax over the first axis does; the message names it.
        """
        return transforms.with_any_batch(self)

    # Models that are trained in another way.

    def with_trainable(self, trainable: Trainable) -> Model:
        """Return a model whose parameters are exactly the given floating-point tensors.

        Args:
          trainable: names, regular expressions (matched in full), wildcards ("*.query"), or a
            predicate of name and value. A name is that of a tensor, including names that Identity
            nodes give it (`jaxonnx.load`, `tied`). If no tensor has the name, it is that of a
            module or node (as in `with_outputs`) and means the weights that are used there.
            `summary` lists all of these names. Running statistics are selected by their exact names
            only.

        Raises:
          InputError: a name or expression matches no floating-point tensor, module or node; the
            message suggests similar ones.
        """
        check_arguments(Model.with_trainable, locals())
        return network.with_params(self, trainable)

    def with_statistics(self, statistics: Literal["batch", "frozen"]) -> Model:
        """Return a model that uses batch or running statistics of BatchNormalization in training.

        Args:
          statistics: "batch" uses the statistics of the batch and updates the running ones; this is
            the default of a loaded file. "frozen" uses the running statistics and keeps them, while
            scale and bias are trained. Use it for small batches, or for new data with little
            variety.

        Raises:
          InputError: `statistics` has another value.
        """
        check_arguments(Model.with_statistics, locals())
        net = leave(self, FrozenStatistics)
        return enter(net, FrozenStatistics()) if statistics == "frozen" else net

    def with_dropout(self, ratio: float | Mapping[str, float]) -> Model:
        """Return a model with other Dropout ratios in training.

        Inference and `save` do not change. Dropout nodes of the file are active in training by
        default, with the ratio in the file. Most exporters remove them from files for inference.

        Args:
          ratio: the ratio of all Dropout nodes; or a ratio by value, node or module (as in
            `with_outputs`). Dropout is inserted after these, unless they are Dropout nodes.

        Raises:
          InputError: there is no Dropout node, no such value, or a ratio is not in [0, 1).
        """
        new = drop(self.program.find(Dropout), self.graph, self.proto.graph, ratio)
        return enter(leave(self, Dropout), new)

    def with_remat(self) -> Model:
        """Return a model that stores few activations in training and recomputes the others.

        The outputs of about sqrt(n) of n nodes are stored. A step takes up to a third longer.
        """
        return enter(self, Remat())

    # Models whose weights have another form.

    def sparsity_options(self) -> dict[str, Any]:
        """Return the arguments `exclude` and `axes` of `sparse.layers` for this graph.

        Weights with any use besides dense matrix products and convolutions are excluded:
        embeddings, grouped convolutions, tables that are added. The input axis is the axis that the
        product sums over, at the first use of the weight.
        """
        return options(self)

    def with_sparsity(
        self,
        pattern: Patterns | None = "2:4",
        *,
        transposable: bool = True,
        method: str = "",
        **choice: Any,
    ) -> Model:
        """Return a model that records which weights are sparse, for `save` and `sparse.verify`.

        Use it after a training loop of your own; `jaxonnx.train` does it itself. The weights do not
        change; `sparse.prune` makes them sparse.

        Args:
          pattern, transposable: as in `sparse.layers`. None removes the record. A dict of patterns
            may name modules and nodes, as in `with_trainable`.
          method: how the weights were trained, a text for the record.
          choice: `select`, `exclude` and `axes`, as in `sparse.layers`; by default those of
            `sparsity_options`. `select` may name modules and nodes, as in `with_trainable`.

        Raises:
          SparsityError: no weight can have the pattern.
        """
        check_arguments(Model.with_sparsity, locals())
        return with_record(self, pattern, transposable, method, choice)

    def with_sparse_products(self) -> Model:
        """Return a model whose calls skip the zeros of weights that are recorded as 2:4.

        `model(x)`, `apply`, `predict`, `evaluate` and other inference use the kernels of
        `sparse.sparse_products`. Training and saved files do not change. If the platform has no
        kernel, or no compiler for it, products stay dense, with a warning.

        Raises:
          SparsityError: the model has no record of 2:4 weights (`sparse.record`).
        """
        return with_products(self)

    def with_float_weights(self) -> Model:
        """Return a quantized model with the floating-point weights before rounding as parameters.

        This is the first step of training with `quantize=`. Calls return the same values, and
        `save` writes the quantized file with the new weights. A model that is not quantized is
        returned unchanged.
        """
        return open_quantized(self)[0] if is_quantized(self) else self

    def merge_adapters(self, *, requantize: bool = False, check: bool = True) -> Model:
        """Return a model with its adapters (`jaxonnx.LoRA`) merged into the weights.

        Its parameters are those of the model before the adapters were attached, and the tensors
        that were trained besides them. A model without adapters is returned unchanged.

        Args:
          requantize: quantize merged weights of few bits again, in their type and block size. All
            other tensors stay bit for bit the same. The scale of a block is the one with the
            smallest error: the old one, the one of the new range, or either refined by least
            squares. Changes below the quantization step are lost. A warning lists the relative
            errors, the largest first.
          check: compare the file of the merged model on random inputs with the model that has its
            adapters apart, by onnxruntime where it is installed. A warning says so where this is
            not possible. Adapters of weights of 16 bits or fewer, which merging rounds, are not
            compared.

        Raises:
          InputError: `requantize` is False and weights have few bits; or a weight is dequantized in
            several ways, or by an operator that cannot be quantized again.
          ModelError: `check` finds a difference; the message names the first node that differs.
        """
        check_arguments(Model.merge_adapters, locals())
        return merge(self, requantize=requantize, check=check)

    # Files.

    def to_onnx(self, *, adapters: AdapterForm | None = None) -> ModelProto:
        """Return the original graph with the weights of this model, as a ModelProto for inference.

        Weights of a quantized model are integers. A record of sparse weights is kept for those that
        still have the pattern.

        Args:
          adapters: as in `save`.
        """
        return to_proto(self, adapters)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        external_data: bool = False,
        sparse: bool = False,
        adapters: AdapterForm | None = None,
        check: bool = True,
    ) -> None:
        """Write the original graph with the weights of this model to a file, atomically.

        Sparse weights are written with their zeros, which every runtime reads and compilers detect
        (TensorRT: `trtexec --sparsity=enable`, or the builder flag `SPARSE_WEIGHTS`). If weights
        have 2:4 zeros without a record (`sparse.record`), a warning says so.

        Args:
          path: the format depends on the ending. .onnx: an ONNX file. .npz: graph and weights, the
            sparse weights packed; `jaxonnx.load` reads it. .safetensors: parameters and state by
            name, for `jaxonnx.load(..., weights=path)`. A folder (one that exists, or with a slash
            at the end), for a model that was loaded from a folder: configuration and tokenizer are
            copied, so that the same runtime reads it. Other endings are those of formats that
            `jaxonnx.formats.register` has.
          external_data: write the weights to a second file. Above 2 GB this is always done.
          sparse: write sparse weights as ONNX sparse initializers, which few runtimes read.
          adapters: how adapters of `jaxonnx.LoRA` are written. "merged": into the weights; weights
            of few bits are rounded as by `merge_adapters(requantize=True)`. "nodes": as two small
            products and a sum after each weight, which stays bit for bit the same. "inputs": the
            same, with A and B as optional inputs of any rank, empty by default; onnxruntime sets
            them from an .onnx_adapter file (`Adapters.save`). The default is "nodes" for weights
            stored in few bits, else "merged".
          check: if nodes were added or rewritten since the file was loaded, check by onnx's checker
            and, where it is installed, by a session of onnxruntime that the file is valid, before
            anything is written. The file of a model with adapters is compared with the model, on
            random inputs, as by `merge_adapters`. Above 256 MiB of weights it is not checked, with
            a warning.

        Raises:
          InputError: the format does not have an option, adapters cannot be written in this way, or
            the path is a folder and the model was not loaded from one.
          ModelError: `check` finds that the file is not valid, or that it computes something
            else; the message names the node.
          OSError: the path cannot be written.
          SparsityError: a packed or sparse format is requested, and the model has no record of
            sparse weights.
        """
        check_arguments(Model.save, locals())
        save(self, path, external_data=external_data, sparse=sparse, adapters=adapters, check=check)

    # Tables.

    def summary(self) -> Summary:
        """Return a table of the layers: operator, output shape, parameters, trained or not, notes.

        It prints as a table in terminals and notebooks. `.layers` has the rows.
        """
        return summary(self, self._places.roles.constants)

    def shardings(
        self,
        mesh: Mesh | Literal["all"],
        sharding: Sharding = "data",
        *,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Shardings:
        """Return the placement of each tensor on a mesh, as a table; no array is moved.

        >>> from jaxonnx import demo
        >>> table = demo.model().shardings("all", "fsdp")
        >>> table.specs["14.bias"]
        P()

        Args:
          mesh, sharding: as in `jaxonnx.train`.
          optimizer: its state is counted as well; by default that of Adam, two values per
            parameter.

        Raises:
          InputError: a rule matches no tensor, an axis is not divisible by the number of devices,
            or the mesh does not have a named axis.
        """
        check_arguments(Model.shardings, locals())
        return shardings(self, mesh, sharding, optimizer)

    def __repr__(self) -> str:
        signature = f"{list_values(self.inputs)} -> {list_values(self.outputs)}"
        return f"Model({signature}; {format_count(len(self.params), 'trained tensor')})"

    def __rich__(self) -> Group:
        return overview(self, self.warnings)


def _unpack_single(outputs: tuple) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs


def _unpickle(values: dict[str, Any], about: dict[str, Any]) -> Model:
    """Return the model whose fields, and those of its program, `Model.__reduce__` listed."""
    tensors = {**about["constants"], **values["state"], **values["params"]}
    base = network.bind_file(values["proto"], tensors)
    return Model(**values, program=Program(base, **about))

"""An ONNX network as a module of Flax nnx.

Not imported by `import jaxonnx`; `jaxonnx.flax` imports it at first use.
"""

from dataclasses import fields, replace
from typing import Any

import jax
from flax import nnx

from jaxonnx._graph.roles import running_statistics
from jaxonnx._require import check_arguments
from jaxonnx.errors import InputError
from jaxonnx.model import Model


class Module(nnx.Module):
    """A Model as an `nnx.Module`, to be composed with other modules.

    >>> import jax, jaxonnx
    >>> from jaxonnx import demo
    >>> network = jaxonnx.flax.Module(demo.model())
    >>> len(jax.tree.leaves(nnx.state(network, nnx.Param)))
    13
    >>> trained = network.to_model()  # with the weights that the module has now

    Attributes:
      params: `nnx.Param` by tensor name.
      state: by tensor name, `nnx.BatchStat` for running statistics and a plain `nnx.Variable` for
        other tensors that are not trained.
      deterministic: what `train()`, `eval()` and `nnx.view(..., deterministic=)`, of this module or
        one around it, set. In inference BatchNormalization uses its running statistics and Dropout
        is inactive; in training it uses those of the batch, renews the running ones, and Dropout
        draws from the stream "dropout" of `rngs`.
    """

    def __init__(
        self, model: Model, *, deterministic: bool = True, rngs: nnx.Rngs | None = None
    ) -> None:
        """Make a module with the weights of `model`, in inference mode unless told otherwise.

        Args:
          model: what `jaxonnx.load` returns.
          deterministic: False starts in training mode.
          rngs: needed to train a model with Dropout, and to run one with RandomNormal and the like.
        """
        check_arguments(Module.__init__, locals())
        statistics = running_statistics(model.graph)
        self.params: dict[str, Any] = nnx.data(
            {name: nnx.Param(v) for name, v in model.params.items()}
        )
        self.state: dict[str, Any] = nnx.data(
            {
                name: (nnx.BatchStat if name in statistics else nnx.Variable)(value)
                for name, value in model.state.items()
            }
        )
        self.rngs: nnx.Rngs | None = nnx.data(None if rngs is None else rngs.fork())
        self.deterministic: bool = deterministic
        self._functions = _Functions(model)

    def __call__(self, /, *inputs: Any, **named: Any) -> Any:
        """Run the network on inputs as in a Model, with this module's weights.

        Returns an array if there is one output, else a tuple in file order.

        Raises:
          InputError: arguments that do not fit the inputs, or random numbers without `rngs`.
        """
        model = self._functions.model
        params = {name: variable[...] for name, variable in self.params.items()}
        state = {name: variable[...] for name, variable in self.state.items()}
        key = None
        if model.program.draws(not self.deterministic):
            if self.rngs is None:
                raise InputError(
                    "the model has operators that draw random numbers: make the module with "
                    "rngs=nnx.Rngs(seed)"
                )
            key = self.rngs.dropout()
        if self.deterministic:
            return model.apply(params, *inputs, state_=state, rng_=key, **named)
        outputs, renewed = model.apply_train(params, state, key, *inputs, **named)
        for name, variable in self.state.items():
            if renewed[name] is not state[name]:
                variable[...] = renewed[name]
        return outputs

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set the mode; `nnx.view` calls this.

        Args:
          deterministic: if True, inference: running statistics, and no Dropout.
        """
        check_arguments(Module.set_view, locals())
        if deterministic is not None:
            self.deterministic = deterministic

    def to_model(self) -> Model:
        """Return a Model with the present weights, to be saved as ONNX."""
        return self._functions.model.replace(
            params={name: variable[...] for name, variable in self.params.items()},
            state={name: variable[...] for name, variable in self.state.items()},
        )


class _Functions:
    """A model without its weights: a module's own variables hold the only copy of them.

    Equal for all modules with the same network, so that nothing is compiled twice and the modules
    can be stacked.
    """

    def __init__(self, model: Model):
        params, state = jax.eval_shape(lambda: (model.params, model.state))
        self.model = replace(model, params=params, state=state)
        rest = (f.name for f in fields(model) if f.name not in ("params", "state"))
        self._parts = tuple(id(getattr(model, name)) for name in rest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Functions) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

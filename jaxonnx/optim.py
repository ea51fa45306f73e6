"""The update rules of the ONNX training operators Adam, Adagrad and Momentum.

Each rule is one function on one tensor, in the letters of the specification: X is the tensor,
G its gradient, R the learning rate, T the update count. The operators of
`ai.onnx.preview.training` and the optax transformations below both use it, so 100 updates
of a transformation are 100 executions of the operator. Nothing here needs an ONNX file.

The transformations work wherever optax takes one: `optax.chain`, `optax.multi_transform`,
`optax.MultiSteps`, `optax.inject_hyperparams`. Coefficients are attributes in ONNX and thus
float32: a Python number is rounded to it (0.9 means 0.89999998, also for float64 tensors). The
learning rate is an operator's input and is not.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxonnx._require import check_arguments
from jaxonnx.errors import TrainingError

MODES = ("standard", "nesterov")


def adam_rule(
    X: Any,
    G: Any,
    V: Any,
    H: Any,
    *,
    R: Any,
    T: Any,
    alpha: Any,
    beta: Any,
    epsilon: Any,
    norm_coefficient: Any = 0.0,
    norm_coefficient_post: Any = 0.0,
) -> tuple[Any, Any, Any]:
    """Compute one update of Adam: `(dX, V_new, H_new)`, where X_new is X + dX.

    All arrays have the shape and dtype of X, R and T are scalars.
    """
    G = _add_l2(G, X, norm_coefficient)
    V = _like(X, alpha) * V + _like(X, 1 - alpha) * G
    H = _like(X, beta) * H + _like(X, 1 - beta) * G * G
    dX = -_like(X, _adam_rate(R, T, alpha, beta)) * V / (_sqrt(H) + _like(X, epsilon))
    if not _is_zero(norm_coefficient_post):
        dX = dX - _like(X, norm_coefficient_post) * (X + dX)
    return dX, V, H


def adagrad_rule(
    X: Any,
    G: Any,
    H: Any,
    *,
    R: Any,
    T: Any,
    decay_factor: Any,
    epsilon: Any,
    norm_coefficient: Any = 0.0,
) -> tuple[Any, Any]:
    """Compute one update of Adagrad: `(dX, H_new)`, where X_new is X + dX."""
    G = _add_l2(G, X, norm_coefficient)
    H = H + G * G
    r = R / (1 + _like(R, T) * _like(R, decay_factor))
    return -_like(X, r) * G / (_sqrt(H) + _like(X, epsilon)), H


def momentum_rule(
    X: Any,
    G: Any,
    V: Any,
    *,
    R: Any,
    T: Any,
    alpha: Any,
    beta: Any,
    mode: str,
    norm_coefficient: Any = 0.0,
) -> tuple[Any, Any]:
    """Compute one update of SGD with momentum: `(dX, V_new)`, where X_new is X + dX.

    `mode` is one of MODES.
    """
    G = _add_l2(G, X, norm_coefficient)
    V = _like(X, alpha) * V + _like(X, jnp.where(T > 0, beta, 1.0)) * G
    direction = V if mode == "standard" else G + _like(X, alpha) * V
    return -_like(X, R) * direction, V


def _like(x, coefficient):
    return jnp.asarray(coefficient, jnp.result_type(x))


def _is_zero(coefficient) -> bool:
    return isinstance(coefficient, float) and coefficient == 0


def _add_l2(G, X, norm_coefficient):
    return G if _is_zero(norm_coefficient) else _like(X, norm_coefficient) * X + G


def _sqrt(h):
    # Differentiable at 0 too, where the quotients above are smooth thanks to epsilon, so that a
    # gradient taken through an update (meta-learning) is not NaN for a weight at rest.
    return jnp.where(h == 0, 0, jnp.sqrt(jnp.where(h == 0, 1, h)))


def _adam_rate(R, T, alpha, beta):
    # 1 - beta**T loses four of float32's seven digits while T is small; expm1 keeps them.
    t = jnp.maximum(_like(R, T), 1)
    corrected = R * jnp.sqrt(_one_minus_power(beta, t)) / _one_minus_power(alpha, t)
    return jnp.where(T > 0, corrected, R)


def _one_minus_power(base, t):
    if isinstance(base, float) and not 0 < base < 1:
        return 1 - _like(t, base) ** t
    log = np.log(base) if isinstance(base, float) else jnp.log(base)
    return -jnp.expm1(t * _like(t, log))


class OnnxTransformation(optax.GradientTransformation):
    """An `optax.GradientTransformation` that also knows which ONNX operator it is.

    Attributes:
      operator: "Adam", "Adagrad" or "Momentum".
      attributes: the operator's attributes.
      learning_rate: a number, an array or a schedule, as passed.
      first: the update count T of the first update.
    """

    operator: str
    attributes: Mapping[str, Any]
    learning_rate: Any
    first: Any


class AdamState(NamedTuple):
    """The state of Adam: `count` updates were made; V and H average gradient and its square."""

    count: jax.Array
    V: optax.Updates
    H: optax.Updates


class AdagradState(NamedTuple):
    """The state of Adagrad: `count` updates were made; H sums the squared gradients."""

    count: jax.Array
    H: optax.Updates


class MomentumState(NamedTuple):
    """The state of Momentum: `count` updates were made; V is the momentum."""

    count: jax.Array
    V: optax.Updates


def adam(
    learning_rate: optax.ScalarOrSchedule,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    *,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
    T: int = 0,
) -> OnnxTransformation:
    r"""Return Adam as the ONNX operator of that name defines it.

    .. math::
        G' &= G + \text{norm\_coefficient} \cdot X \\
        V &\leftarrow \alpha V + (1 - \alpha) G' \\
        H &\leftarrow \beta H + (1 - \beta) G'^2 \\
        R' &= R \sqrt{1 - \beta^T} / (1 - \alpha^T) \text{ if } T > 0 \text{ else } R \\
        X &\leftarrow (1 - \text{norm\_coefficient\_post})
            \left(X - R' V / (\sqrt{H} + \epsilon)\right)

    It differs from `optax.adam` and `torch.optim.Adam` in two points. Epsilon is added to the
    uncorrected root: an update at count T is theirs with eps = epsilon / sqrt(1 - beta**T).
    And the count of the first update is 0 as the specification reads, so that this update is not
    corrected for its bias and (1 - alpha) / sqrt(1 - beta) times the learning rate long (3.2 times
    with the defaults); with `T=1` it is corrected like theirs.

    Args:
      learning_rate: R, a number or a schedule (a function of the updates made so far).
      alpha: decay of the averaged gradient V.
      beta: decay of the averaged squared gradient H.
      epsilon: added to the root of H; keeps the quotient finite.
      norm_coefficient: adds the gradient of norm_coefficient / 2 * ||X||^2 (L2 regularisation).
      norm_coefficient_post: shrinks the updated X by this fraction (decoupled weight decay).
      T: the update count of the first update.

    Returns:
      A transformation with an `AdamState`; V and H have shapes and dtypes of the parameters.
      Its update needs `params` where a norm coefficient is not 0 (`TrainingError` otherwise).

    References:
      Adam of ai.onnx.preview.training, version 1;
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014.

    >>> optimizer = adam(0.1, T=1)
    >>> x = jnp.array([1.0, -2.0])
    >>> state = optimizer.init(x)
    >>> updates, state = optimizer.update(2 * x, state, x)
    >>> print(optax.apply_updates(x, updates).round(4))
    [ 0.9 -1.9]
    """
    attributes = _round_coefficients(
        alpha=alpha,
        beta=beta,
        epsilon=epsilon,
        norm_coefficient=norm_coefficient,
        norm_coefficient_post=norm_coefficient_post,
    )
    return _transformation("Adam", adam_rule, AdamState, attributes, learning_rate, T)


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    epsilon: float = 1e-6,
    decay_factor: float = 0.0,
    *,
    norm_coefficient: float = 0.0,
    T: int = 0,
) -> OnnxTransformation:
    r"""Return Adagrad as the ONNX operator of that name defines it.

    .. math::
        G' &= G + \text{norm\_coefficient} \cdot X \\
        H &\leftarrow H + G'^2 \\
        X &\leftarrow X - \frac{R}{1 + T \cdot \text{decay\_factor}} G' / (\sqrt{H} + \epsilon)

    These are the updates of `torch.optim.Adagrad` with the same eps, lr_decay and weight_decay.

    Args:
      learning_rate: R, a number or a schedule (a function of the updates made so far).
      epsilon: added to the root of H; keeps the quotient finite.
      decay_factor: lets the learning rate fall with the update count.
      norm_coefficient: adds the gradient of norm_coefficient / 2 * ||X||^2 (L2 regularisation).
      T: the update count of the first update.

    Returns:
      A transformation with an `AdagradState`, whose H starts at 0.

    References:
      Adagrad of ai.onnx.preview.training, version 1;
      Duchi, Hazan and Singer, `Adaptive subgradient methods
      <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.

    >>> optimizer = adagrad(0.1)
    >>> x = jnp.array([1.0, -2.0])
    >>> state = optimizer.init(x)
    >>> updates, state = optimizer.update(2 * x, state, x)
    >>> print(optax.apply_updates(x, updates).round(4))
    [ 0.9 -1.9]
    """
    attributes = _round_coefficients(
        epsilon=epsilon, decay_factor=decay_factor, norm_coefficient=norm_coefficient
    )
    return _transformation("Adagrad", adagrad_rule, AdagradState, attributes, learning_rate, T)


def momentum(
    learning_rate: optax.ScalarOrSchedule,
    alpha: float = 0.9,
    beta: float = 1.0,
    *,
    mode: str = "standard",
    norm_coefficient: float = 0.0,
) -> OnnxTransformation:
    r"""Return stochastic gradient descent with momentum as the ONNX operator Momentum defines it.

    .. math::
        G' &= G + \text{norm\_coefficient} \cdot X \\
        V &\leftarrow \alpha V + (\beta \text{ if } T > 0 \text{ else } 1) G' \\
        X &\leftarrow X - R V && \text{(standard)} \\
        X &\leftarrow X - R (G' + \alpha V) && \text{(nesterov)}

    With beta = 1 these are the updates of `torch.optim.SGD` with momentum = alpha; with
    beta = 1 - dampening its dampened ones. The operator's attributes have no defaults in ONNX;
    those here are the usual values.

    Args:
      learning_rate: R, a number or a schedule (a function of the updates made so far).
      alpha: decay of the momentum V.
      beta: weight of the gradient in V from the second update on (in the first it is 1).
      mode: "standard" or "nesterov".
      norm_coefficient: adds the gradient of norm_coefficient / 2 * ||X||^2 (L2 regularisation).

    Returns:
      A transformation with a `MomentumState`, whose V starts at 0.

    Raises:
      TrainingError: `mode` is neither of the two.

    References:
      Momentum of ai.onnx.preview.training, version 1;
      Sutskever et al., `On the importance of initialization and momentum in deep learning
      <https://proceedings.mlr.press/v28/sutskever13.html>`_, 2013.

    >>> optimizer = momentum(0.1, mode="nesterov")
    >>> x = jnp.array([1.0, -2.0])
    >>> state = optimizer.init(x)
    >>> updates, state = optimizer.update(2 * x, state, x)
    >>> print(optax.apply_updates(x, updates).round(4))
    [ 0.62 -1.24]
    """
    check_arguments(momentum, locals())
    if mode not in MODES:
        raise TrainingError(f"mode is {mode!r}; Momentum knows {' and '.join(MODES)}")
    attributes = _round_coefficients(alpha=alpha, beta=beta, norm_coefficient=norm_coefficient)
    attributes["mode"] = mode
    return _transformation("Momentum", momentum_rule, MomentumState, attributes, learning_rate, 0)


def as_attribute(value: Any) -> Any:
    """Round a number to float32, as ONNX stores it.

    Arrays, which `optax.inject_hyperparams` passes, have a dtype of their own and stay.
    """
    return float(np.float32(value)) if isinstance(value, int | float) else value


def _round_coefficients(**coefficients) -> dict[str, Any]:
    return {name: as_attribute(value) for name, value in coefficients.items()}


def _transformation(
    operator: str, rule: Callable, State: Any, attributes: dict, learning_rate: Any, first: Any
) -> OnnxTransformation:
    slots = len(State._fields) - 1
    shrinks = [name for name in attributes if name.startswith("norm_coefficient")]

    def init(params):
        zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(slots)]
        return State(jnp.zeros([], jnp.int32), *zeros)

    def update(updates, state, params=None):
        if params is None:
            if not all(_is_zero(attributes[name]) for name in shrinks):
                raise TrainingError(f"{operator} needs params: {' and '.join(shrinks)} act on them")
            params = updates
        R = learning_rate(state.count) if callable(learning_rate) else learning_rate
        scalars = {"R": jnp.asarray(R), "T": state.count + first}
        leaves, treedef = jax.tree.flatten(updates)
        columns = [treedef.flatten_up_to(tree) for tree in (params, *state[1:])]
        rows = [
            rule(x, g, *tensors, **scalars, **attributes)
            for g, x, *tensors in zip(leaves, *columns, strict=True)
        ]
        table = zip(*rows, strict=True) if rows else [()] * (slots + 1)
        trees = [treedef.unflatten(column) for column in table]
        return trees[0], State(optax.safe_increment(state.count), *trees[1:])

    transformation = OnnxTransformation(init, update)
    transformation.operator = operator
    transformation.attributes = attributes
    transformation.learning_rate = learning_rate
    transformation.first = first
    return transformation

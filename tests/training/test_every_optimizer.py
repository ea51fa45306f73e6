"""Every optimizer of optax and optax.contrib trains as in optax's own loop, its state donated."""

import inspect

import jax
import numpy as np
import optax
import pytest
from optax import contrib

import jaxonnx
from tests.support.sweeps import sweep
from tests.support.tiny_networks import LABELS, examples, mlp, train, weights

SGD = optax.sgd(0.1)
MATRICES = {"w1": True, "b1": False, "w2": True, "b2": False}
GROUPS = {"w1": "one", "b1": "two", "w2": "one", "b2": "two"}
ARGUMENTS = {
    "learning_rate": 0.01, "inner": SGD, "base_optimizer": SGD, "optimizer": SGD,
    "fast_optimizer": SGD, "adv_optimizer": SGD, "sync_period": 2, "slow_step_size": 0.5,
    "step_size_fn": lambda count: 0.1 / (1 + count), "step_size": -0.1, "mask": MATRICES,
    "freeze_mask": MATRICES, "transforms": {"one": SGD, "two": optax.adam(0.1)},
    "param_labels": GROUPS, "max_delta": 0.1, "max_norm": 0.1, "threshold": 0.1, "clipping": 0.1,
    "decay": 0.9, "eta": 0.01, "gamma": 0.55, "seed": 0, "max_consecutive_errors": 3,
    "l2_norm_clip": 1.0, "noise_multiplier": 0.1, "max_backtracking_steps": 5,
    "max_linesearch_steps": 5, "should_transform_fn": lambda count: count < 1,
    "measure_name": "updates", "measure": lambda updates, *_, **__: updates,
}  # fmt: skip
"""For arguments that have no default."""
OF_FUNCTIONS = {
    *("chain", "named_chain", "stateless", "stateless_with_tree_map", "with_extra_args_support"),
    *("inject_hyperparams", "inject_stateful_hyperparams"),
}
REFUSED = {"dpsgd", "differentially_private_aggregate", "scale_by_muon"}
"""For gradients of single examples, and for matrices alone; optax raises errors as well."""
KINDS = {
    *("adam", "adafactor", "muon", "prodigy", "mechanize"),
    *("lbfgs", "reduce_on_plateau", "sophia", "sam"),  # functions and values of the batch
    *("lookahead", "schedule_free_adamw"),  # other weights to evaluate
    *("masked", "multi_transform", "apply_if_finite", "dpsgd"),
}
"""One of each kind that a step treats differently; the others are deep."""


def list_optimizers():
    for module in (optax, contrib):
        for name, make in sorted(vars(module).items()):
            if not inspect.isfunction(make) or name.startswith("_") or name in OF_FUNCTIONS:
                continue
            about = inspect.signature(make)
            returned = str(about.return_annotation)
            if "GradientTransformation" in returned or name in ("dog", "dowg"):
                needed = [p.name for p in about.parameters.values() if p.default is p.empty]
                marks = () if name in KINDS else pytest.mark.deep
                yield pytest.param(make, needed, id=name, marks=marks)


@pytest.fixture(scope="module")
def problem():
    model = jaxonnx.load(mlp())
    batches = [tuple(x[i : i + 8] for x in examples()) for i in range(0, 24, 8)]

    def loss(params, x, y):
        logits, _ = model.apply_train(params, model.state, jax.random.key(0), x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return model, batches, loss


def walk(rule, problem):
    """The weights to evaluate after a loop of optax."""
    model, batches, loss = problem
    params, taken = dict(model.params), optax.with_extra_args_support(rule)
    state = taken.init(params)
    is_lookahead = isinstance(state, optax.LookaheadState)
    is_sam, is_sophia = "SAMState" in str(type(state)), "SophiaState" in str(state)
    if is_lookahead:
        params = optax.LookaheadParams.init_synced(params)

    @jax.jit
    def update(params, state, x, y):
        def value_fn(params, *_):
            return loss(params, x, y)

        value, g = jax.value_and_grad(value_fn)(params.fast if is_lookahead else params)
        extra = {"value": value, "grad": g}
        extra |= {"obj_fn": value_fn} if is_sophia else {"value_fn": value_fn}
        extra = {"grad_fn": jax.grad(value_fn)} if is_sam else extra
        updates, state = taken.update(g, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        before = params
        params, state = update(params, state, *batch)
    if isinstance(state, contrib.ScheduleFreeState):
        return contrib.schedule_free_eval_params(state, params)
    if is_sam and state.cache is not None:  # the third step of three was adversarial
        return before
    return params.slow if is_lookahead else params


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "needed"), [*list_optimizers()])
def test_updates_are_those_of_optax(make, needed, problem):
    model, batches, _ = problem
    rule = make(**{name: ARGUMENTS[name] for name in needed})
    if make.__name__ in REFUSED:
        with pytest.raises(jaxonnx.TrainingError, match="cannot update parameters that are a dict"):
            jaxonnx.training.step(model, LABELS, rule)
        return
    step = jaxonnx.training.step(model, LABELS, rule)
    update, state = jax.jit(step.update, donate_argnums=0), step.init()
    for batch in batches:
        state, (_, finite) = update(state, batch, step.frozen)
        assert finite
    for name, value in walk(rule, problem).items():
        np.testing.assert_allclose(step.view(state)[name], value, rtol=2e-4, atol=2e-6)
    assert isinstance(model.params["w1"].sum().item(), float)  # was not donated


def test_opaque_sam_takes_its_gradients_from_the_step(problem):
    rule = contrib.sam(SGD, optax.chain(contrib.normalize(), SGD), opaque_mode=True)
    result = weights(train(data=problem[1], optimizer=rule))
    for name, value in walk(rule, problem).items():
        np.testing.assert_allclose(result[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "rule", [optax.lbfgs(), contrib.sam(SGD, SGD, opaque_mode=True), contrib.sophia(0.1)]
)
def test_functions_of_one_batch_do_not_go_with_several(rule):
    with pytest.raises(jaxonnx.TrainingError, match="with accumulate= it gets no value_fn"):
        train(optimizer=rule, accumulate=2)


def test_an_optimizer_of_other_parameters_is_refused():
    rule = optax.masked(optax.adam(0.1), {"v1": True, "v2": False})
    with pytest.raises(jaxonnx.TrainingError, match="cannot update parameters that are a dict"):
        train(optimizer=rule)


@pytest.mark.parametrize(
    "rule", sweep([contrib.mechanize(SGD)], 0) + sweep([contrib.prodigy(), contrib.cocob()])
)
def test_shared_buffers_on_a_mesh_and_after_a_rollback(rule):
    mesh = jax.make_mesh((1,), ("data",))
    plain, meshed = train(optimizer=rule), train(optimizer=rule, mesh=mesh)
    back = train(optimizer=rule, nan="rollback")
    for name, value in weights(plain).items():
        np.testing.assert_allclose(weights(meshed)[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(weights(back)[name], value)

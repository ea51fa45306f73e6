"""Every case of `tests/ops/cases`: forward, compiled, differentiated, batched; and the coverage."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from jaxonnx.registry import lookup, operators
from tests.ops.case_table import is_float, schema_versions
from tests.ops.operator_cases import CASES, assert_same, compilable, newest, partial, traced
from tests.support import central_differences

UNTABLED = {
    # Operators that do not fit a table: their tests are plain functions.
    "maps": "CastMap DictVectorizer ZipMap",
    "control flow and sequences": """If Loop Scan SequenceMap SequenceAt SequenceConstruct
        SequenceEmpty SequenceErase SequenceInsert SequenceLength SplitToSequence
        ConcatFromSequence Optional OptionalGetElement OptionalHasElement""",
    "text": "StringConcat StringNormalizer StringSplit RegexFullMatch TfIdfVectorizer",
    "random": """Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform
        RandomUniformLike""",
    "training": "Gradient Adam Adagrad Momentum",
}


def batchable(case):
    return compilable(case) and case.vmap and traced(case, newest(case))


SHARED = {"elementwise", "logic", "reduction"}
"""Modules whose operators share the code that reads attributes and ranks."""
SYSTEMATIC = SHARED | {
    *("activation", "grid", "ml", "resize", "roi", "shape", "signal", "slicing"),
}
"""Modules whose cases are combinations of attributes, rather than values to take care with."""


def settings(param):
    """Yield what a case is a combination of."""
    case, module = param.values[0], param.id.partition("-")[0]
    version = newest(case)
    yield case.domain, case.op, version
    where = module if module in SHARED else (case.domain, case.op)
    yield where, "counts", len(case.inputs), case.outputs
    for name, value in case.attributes.items():
        yield where, name, value.tobytes() if isinstance(value, np.ndarray) else repr(value)
    static = case.operator(version).static
    for i, value in enumerate(case.inputs):
        known = value is None or i in static
        yield where, i, repr(value) if known else np.ndim(value)


def each_setting(params):
    """Return the cases without those whose settings all stand in cases before them."""
    seen, kept = set(), []
    for param in params:
        new = set(settings(param)) - seen
        if new or param.id.partition("-")[0] not in SYSTEMATIC:
            kept.append(param)
        seen |= new
    return kept


BATCHED = each_setting([c for c in CASES if batchable(c.values[0])])


@pytest.mark.parametrize("case", CASES)
def test_forward(case):
    """Known inputs, for every version, against the oracle; concrete ones if none can be traced.

    Versions with one implementation are bound each and evaluated once.
    """
    with jax.enable_x64(True):
        assert case.versions(), "the case covers no version of the schema"
        results = {}
        for version in case.versions():
            function, wanted = case.function(version), case.wanted(version)
            since = case.operator(version).since
            if since not in results:
                results[since] = function(*case.inputs)
            assert_same(results[since], wanted, case)
        if not compilable(case):
            arrays = partial(function, case.inputs, traced(case, version))
            values = [jnp.asarray(case.inputs[i]) for i in traced(case, version)]
            assert_same(arrays(*values), wanted, case)


@pytest.mark.deep
@pytest.mark.parametrize(
    "case", [c for c in CASES if compilable(c.values[0]) and not batchable(c.values[0])]
)
def test_jit(case):
    """Where `test_vmap`, which compiles as well, has no batch."""
    with jax.enable_x64(True):
        version = newest(case)
        positions = traced(case, version)
        function = partial(case.function(version), case.inputs, positions)
        values = [case.inputs[i] for i in positions]
        assert_same(jax.jit(function)(*values), case.wanted(version), case)


def is_real(value):
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def differentiable(case):
    positions = case.grad
    if positions is None:
        positions = [i for i in traced(case, newest(case)) if is_float(case.inputs[i])]
    return list(positions)


DIFFERENTIATED = each_setting(
    [c for c in CASES if compilable(c.values[0]) and differentiable(c.values[0])]
)
FIRST = {
    (c.values[0].domain, c.values[0].op): c.values[0]
    for c in DIFFERENTIATED[::-1]
    if c.values[0].order > 1
}
"""The case of each operator that shows its second derivatives."""


def order(case):
    """Return the order of the derivatives: the first case of an operator shows the second."""
    return 2 if FIRST.get((case.domain, case.op)) is case else 1


@pytest.mark.deep
@pytest.mark.parametrize("case", DIFFERENTIATED)
def test_gradient(case):
    """Derivatives in float64 against central differences, reverse and forward mode."""
    with jax.enable_x64(True):
        positions = differentiable(case)
        inputs = [v.astype(np.float64) if is_float(v) else v for v in case.inputs]
        function = partial(case.function(newest(case), inputs), inputs, positions)

        def real(*values):
            results = [y for y in function(*values) if is_real(y)]
            assert results, "no output is real; set grad=()"
            return results

        places = [inputs[i] for i in positions]
        central_differences.check(real, places, order(case), rtol=1e-4, atol=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("case", BATCHED)
def test_vmap(case):
    """Each row of a batch of two is a single result."""
    with jax.enable_x64(True):
        version = newest(case)
        positions = traced(case, version)
        function = jax.jit(jax.vmap(partial(case.function(version), case.inputs, positions)))
        batch = function(*(np.stack([case.inputs[i]] * 2) for i in positions))
        batch = [np.asarray(y) for y in batch]
        wanted = case.wanted(version)
        for row in (0, 1):
            assert_same([y[row] for y in batch], wanted, case)


def test_every_version_of_every_operator_is_run():
    covered = {
        (c.values[0].domain, c.values[0].op, v) for c in CASES for v in c.values[0].versions()
    }
    plain = {name for names in UNTABLED.values() for name in names.split()}
    missing = [
        (domain, name, version)
        for (domain, name), versions in schema_versions().items()
        for version in versions
        if name not in plain and (domain, name, version) not in covered
    ]
    assert not missing


def test_lookup_finds_every_version():
    for (domain, name), versions in schema_versions().items():
        for version in versions:
            assert lookup(domain, name, version) is not None, (domain, name, version)


@pytest.mark.parametrize("op", [pytest.param(o, id=f"{o.name}-{o.since}") for o in operators()])
def test_signature_is_that_of_the_schema(op):
    """Inputs and attributes as onnx.defs has them, for every version that the function covers.

    What an operator declares of its weights names inputs and attributes that it has.
    """
    trained = {*op.params, *op.vectors, *op.state}
    assert {*op.forms} <= {*op.params}
    assert {*op.starts} <= trained - {*op.forms}
    assert all(0 <= position <= op.last for position in trained)
    assert all({*form.attributes} <= op.attributes for form in op.forms.values())
    if (op.domain, op.name) not in schema_versions():
        own = op.function.__module__.startswith("jaxonnx.ops.contrib.")  # as test_contrib.py tests
        assert op.domain == "com.microsoft" or own
        return
    versions = schema_versions()[op.domain, op.name]
    later = [o.since for o in operators() if (o.domain, o.name) == (op.domain, op.name)]
    until = min([v for v in later if v > op.since], default=10**6)
    covered = [v for v in versions if op.since <= v < until]
    assert covered, "no version of the schema is covered"
    seen = set()
    for version in covered:
        schema = onnx.defs.get_schema(op.name, version, op.domain)
        check_inputs(op, schema)
        for name, attribute in schema.attributes.items():
            if name == "consumed_inputs":
                continue
            assert name in op.attributes, (version, name)
            seen.add(name)
            default = op.defaults.get(name)
            if attribute.required:
                assert name in op.required or len(covered) > 1, (version, name)
            elif attribute.default_value.type:
                wanted = onnx.helper.get_attribute_value(attribute.default_value)
                assert same_default(default, wanted), (version, name, default, wanted)
            else:
                assert default is None or default == (), (version, name, default)
    assert seen == op.attributes


def check_inputs(op, schema):
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    if schema.inputs and schema.inputs[-1].option == variadic:
        assert op.inputs is None
    else:
        assert op.inputs is not None
        assert op.inputs >= len(schema.inputs)


def same_default(ours, schemas):
    if isinstance(schemas, bytes):
        return ours == schemas.decode()
    if isinstance(schemas, float):
        return np.float32(ours) == np.float32(schemas)
    if isinstance(schemas, list):
        return len(ours) == len(schemas) and all(map(same_default, ours, schemas))
    return ours == schemas

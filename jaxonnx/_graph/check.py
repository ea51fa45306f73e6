"""Check nodes against the schemas of their operators: attributes, types, inputs, outputs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx
from onnx import AttributeProto, NodeProto
from onnx.defs import OpSchema

from jaxonnx.errors import ModelError
from jaxonnx.registry import Op


@dataclass(frozen=True)
class _Rules:
    """What one version of a schema demands of a node."""

    inputs: tuple[str | None, ...]
    """The names of the required inputs, None for those that may be omitted."""
    fewest: int
    """The least number of inputs, counting omitted ones."""
    most: int | None
    """The greatest number of inputs; None if any number is allowed."""
    outputs: int | None
    """The greatest number of outputs; None if any number is allowed."""
    types: Mapping[str, int]
    """The AttributeType of each attribute."""


def check_node(
    proto: NodeProto, op: Op, version: int, attributes: Mapping[str, AttributeProto], label: str
) -> None:
    """Raise a ModelError if a node does not fit its operator.

    Args:
      proto: the node.
      op: its operator.
      version: the opset that the graph imports.
      attributes: those of the node, references resolved.
      label: what messages call the node.
    """
    unknown = {*attributes} - op.attributes - {"consumed_inputs"}
    if unknown:
        raise ModelError(
            f"{label} has unknown attributes {sorted(map(str, unknown))}; {op.name} has "
            f"{sorted(op.attributes) or 'none'}"
        )
    missing = op.required - {*attributes}
    if missing:
        raise ModelError(f"{label} lacks the required attributes {sorted(missing)}")
    rules = _rules(op.domain, op.name, version) or _Rules(
        op.needed, len(op.needed), op.inputs, None, {}
    )
    for name, attribute in attributes.items():
        wanted = rules.types.get(name, attribute.type)
        if attribute.type != wanted:
            actual, right = map(AttributeProto.AttributeType.Name, (attribute.type, wanted))
            raise ModelError(f"{label}: attribute '{name}' is {actual}, it must be {right}")
    count = _count(proto.input)
    if rules.most is not None and count > rules.most:
        raise ModelError(f"{label} has {count} inputs; {op.name} takes at most {rules.most}")
    for i, name in enumerate(rules.inputs):
        if name is not None and (i >= count or not proto.input[i]):
            raise ModelError(f"{label} lacks input {i} ({name}), which {op.name} requires")
    if (listed := len(proto.input)) < rules.fewest:  # omitted ones count: Loop(count, "")
        raise ModelError(f"{label} has {listed} inputs; {op.name} takes at least {rules.fewest}")
    listed = _count(proto.output)
    if rules.outputs is not None and listed > rules.outputs:
        raise ModelError(f"{label} has {listed} outputs; {op.name} gives at most {rules.outputs}")


def check_call(
    proto: NodeProto, function: onnx.FunctionProto, attributes: Iterable[str], label: str
) -> None:
    """Raise a ModelError if a node uses attributes, inputs or outputs that its function lacks."""
    declared = {*function.attribute, *(a.name for a in function.attribute_proto)}
    unknown = sorted(map(str, {*attributes} - declared))
    name = f"{function.domain}.{function.name}"
    if unknown:
        raise ModelError(
            f"{label} has unknown attributes {unknown}; function '{name}' has "
            f"{sorted(declared) or 'none'}"
        )
    for what, listed, formal in (
        ("inputs", proto.input, function.input),
        ("outputs", proto.output, function.output),
    ):
        if _count(listed) > len(formal):
            raise ModelError(
                f"{label} has {_count(listed)} {what}; function '{name}' has {len(formal)}"
            )


def _count(names: Sequence[str]) -> int:
    """Return the number of inputs or outputs, without omitted ones at the end."""
    return max((i + 1 for i, name in enumerate(names) if name), default=0)


@cache
def _rules(domain: str, name: str, version: int) -> _Rules | None:
    """Return the rules of ONNX's schema; None for operators that ONNX does not know."""
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None
    kind = OpSchema.FormalParameterOption
    endless = [any(p.option == kind.Variadic for p in ps) for ps in (schema.inputs, schema.outputs)]
    return _Rules(
        inputs=tuple(p.name if p.option == kind.Single else None for p in schema.inputs),
        fewest=schema.min_input,
        most=None if endless[0] else schema.max_input,
        outputs=None if endless[1] else schema.max_output,
        types={
            name: attribute.type.value  # type: ignore[attr-defined]
            for name, attribute in schema.attributes.items()
        },
    )

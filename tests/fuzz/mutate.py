"""Mutations of models: of their bytes, of any field of the proto, and of what a graph means."""

import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

from jaxonnx._io.protos import all_graphs

POWERS = [0, 1, 7, 8, 15, 16, 20, 31, 32, 33, 40, 62, 63]
INTEGERS = [sign * 2**p + d for p in POWERS for sign in (1, -1) for d in (-1, 0, 1)]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-45, 1e-38, 3.4e38, 1e300]
FLOATS += [float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "x", "y", "a\0b", "../x", "ai.onnx", "com.microsoft", "ai.onnx.ml", "é" * 3, "z" * 999]
TEXTS += ["NOTSET", "SAME_UPPER", "VALID", "linear", "cubic", "reflect", "ij->ji", "max", "mean"]
KINDS = [kind for kind in TensorProto.DataType.values() if kind]
SCHEMAS = sorted({(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()})


def integer(random: Random) -> int:
    """Return a small integer more often than not, else one that breaks things."""
    return random.randint(-3, 8) if random.random() < 0.6 else random.choice(INTEGERS)


def number(random: Random) -> float:
    return random.gauss(0, 1) if random.random() < 0.4 else random.choice(FLOATS)


def text(random: Random, near: Message) -> str:
    """Return a word, or a name that the message has."""
    names = [*getattr(near, "input", ()), *getattr(near, "output", ())]
    names = [getattr(name, "name", name) for name in names]
    return random.choice(names if names and random.random() < 0.6 else TEXTS)


def changed(data: bytes, random: Random, other: bytes = b"\0\xff") -> bytes:
    """Return bytes with a few bits, runs, numbers or pieces changed, some of another file."""
    new = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        start = random.randrange(len(new) + 1)
        end = min(len(new), start + random.choice((1, 1, 2, 4, 8, 64)))
        source = random.choice((new, other)) or other
        place = random.randrange(len(source))
        kind = random.randrange(8)
        if kind == 0:
            new[start:end] = random.randbytes(end - start)
        elif kind == 1:
            del new[start:end]
        elif kind == 2:
            new[start:start] = source[place : place + random.choice((1, 4, 64))]
        elif kind == 3:
            new[start:end] = source[place : place + end - start]
        elif kind == 4:
            form = random.choice("BHIQ")
            size = struct.calcsize(form)
            wide = random.choice(INTEGERS) % 2 ** (8 * size)
            new[start : start + size] = struct.pack("<" + form, wide)
        elif kind == 5 and random.random() < 0.2:
            del new[start:]
        elif start < len(new):
            new[start] ^= 1 << random.randrange(8)
    return bytes(new)


def mutated(data: bytes, random: Random, other: bytes, gently: bool = False) -> bytes:
    """Return a model that is changed in one to five ways; `other` is a second model.

    A gentle change leaves it a model that may be valid.
    """
    if not gently and random.random() < 0.25:
        return changed(data, random, other)
    model, second = ModelProto.FromString(data), ModelProto.FromString(other)
    for _ in range(random.choice((1, 1, 1, 2) if gently else (1, 1, 1, 2, 2, 3, 5))):
        random.choice(GENTLE if gently else MUTATIONS)(model, random, second)
    data = model.SerializeToString()
    return changed(data, random, other) if not gently and random.random() < 0.05 else data


def parsed(data: bytes) -> ModelProto | None:
    """Return the model that bytes hold, None if they do not."""
    try:
        return ModelProto.FromString(data)
    except DecodeError:
        return None


def _below(message: Message) -> list[Any]:
    """Return the messages that are set in a message."""
    fields = [(f, value) for f, value in message.ListFields() if f.message_type]
    return [m for f, value in fields for m in (value if f.is_repeated else [value])]


def _field(model: ModelProto, random: Random, other: ModelProto) -> None:
    """Change any field anywhere."""
    message, donor = model, other
    for _ in range(random.randrange(9)):
        inner = _below(message)
        if not inner:
            break
        message = random.choice(inner)
        same = [m for m in _below(donor) if m.DESCRIPTOR is message.DESCRIPTOR]
        donor = random.choice(same) if same else message
    fields = [f for f, _ in message.ListFields()] if random.random() < 0.7 else []
    field = random.choice(fields or message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.is_repeated:
        _repeated(message, field, random, donor)
    elif field.message_type:
        if random.random() < 0.5:
            message.ClearField(field.name)
        else:
            value.CopyFrom(getattr(donor, field.name))
    else:
        setattr(message, field.name, _scalar(message, field, random, value))


def _repeated(message: Any, field: Any, random: Random, donor: Any) -> None:
    values = getattr(message, field.name)
    kind, i = random.randrange(4), random.randrange(len(values) or 1)
    if kind == 0 and values:
        del values[i]
    elif kind == 1 and values:
        values.append(values[i])
    elif kind == 2:
        values.extend(getattr(donor, field.name)[: random.randint(0, 3)])
    elif field.message_type:
        values.add()
    elif values:
        values[i] = _scalar(message, field, random, values[i])
    else:
        values.append(_scalar(message, field, random, field.default_value or None))


def _scalar(message: Any, field: Any, random: Random, old: Any) -> Any:
    if field.cpp_type == field.CPPTYPE_ENUM:
        return random.choice(field.enum_type.values).number
    if field.cpp_type == field.CPPTYPE_STRING:
        if field.type == field.TYPE_BYTES:
            return changed(old or b"", random)
        return text(random, message)
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return number(random)
    bits = 64 if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
    value = integer(random) % 2**bits
    signed = field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_INT32)
    return value - 2**bits if signed and value >> (bits - 1) else value


def _graph(model: ModelProto, random: Random) -> GraphProto:
    return random.choice([*all_graphs(model.graph)])


def _node(model: ModelProto, random: Random) -> NodeProto:
    nodes = [node for graph in all_graphs(model.graph) for node in graph.node]
    nodes += [node for function in model.functions for node in function.node]
    return random.choice(nodes) if nodes else NodeProto()


def _wired(model: ModelProto, random: Random, _: ModelProto) -> None:
    """Let a node read or write another value."""
    graph, node = _graph(model, random), _node(model, random)
    names = [value.name for value in (*graph.input, *graph.initializer)]
    names += [name for other in graph.node for name in other.output] + ["", "?"]
    listed = node.input if random.random() < 0.8 else node.output
    if listed and random.random() < 0.7:
        listed[random.randrange(len(listed))] = random.choice(names)
    elif random.random() < 0.5:
        listed.append(random.choice(names))
    else:
        del listed[-1:]


def _renamed(model: ModelProto, random: Random, _: ModelProto) -> None:
    """Make another operator of a node."""
    node = _node(model, random)
    node.domain, node.op_type = random.choice(SCHEMAS)
    if not any(entry.domain == node.domain for entry in model.opset_import):
        newest = helper.make_opsetid(node.domain, random.randint(1, 5))
        model.opset_import.append(newest)


def _attribute(model: ModelProto, random: Random, _: ModelProto) -> None:
    """Give a node another value for an attribute of its schema, of the right type mostly."""
    node = _node(model, random)
    try:
        schema = onnx.defs.get_schema(node.op_type, node.domain)
    except onnx.defs.SchemaError:
        return
    if not schema.attributes:
        return
    name, declared = random.choice(sorted(schema.attributes.items()))
    old = next((a for a in node.attribute if a.name == name), None)
    kind = random.randint(1, 8) if random.random() < 0.1 else declared.type.value
    length = random.choice((0, 1, 2, 3, len(old.ints) if old else 4))
    made: dict[int, Callable[[], Any]] = {
        AttributeProto.INT: lambda: integer(random),
        AttributeProto.FLOAT: lambda: number(random),
        AttributeProto.STRING: lambda: text(random, node),
        AttributeProto.TENSOR: lambda: _tensor(random),
        AttributeProto.INTS: lambda: [integer(random) for _ in range(length)],
        AttributeProto.FLOATS: lambda: [number(random) for _ in range(length)],
        AttributeProto.STRINGS: lambda: [text(random, node) for _ in range(length)],
    }
    if kind not in made:
        return
    value = made[kind]()
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = 0
    if isinstance(value, list):
        value = [0 if isinstance(v, int) and not -(2**63) <= v < 2**63 else v for v in value]
    new = helper.make_attribute(name, value, attr_type=kind)
    if old is None:
        node.attribute.append(new)
    else:
        old.CopyFrom(new)


def array(random: Random, shape: tuple[int, ...], dtype: np.dtype, nasty: bool) -> np.ndarray:
    """Return an array of small numbers; a nasty one has some that are not."""
    draws = np.random.default_rng(random.getrandbits(32))
    if 0 in shape:
        beyond = math.prod(filter(None, shape)) > 1 << 40  # more than NumPy counts
        return np.zeros([min(size, 4) for size in shape] if beyond else shape, dtype)
    if dtype.kind == "O":
        words = [random.choice(TEXTS) for _ in range(math.prod(shape))]
        return np.array(words, object).reshape(shape)
    floating = dtype.kind in "fcV" and dtype.name not in ("int4", "uint4", "int2", "uint2")
    x = np.asarray(draws.normal(size=shape) if floating else draws.integers(-3, 9, shape))
    if nasty and x.size:
        for _ in range(random.randint(1, 3)):
            value = number(random) if floating else max(min(integer(random), 2**63 - 1), -(2**63))
            x.reshape(-1)[random.randrange(x.size)] = value
    with np.errstate(all="ignore"):
        x = np.abs(x) if dtype.kind == "u" or "uint" in dtype.name else x
        return np.asarray(x).astype(dtype)  # a scalar is no array to onnxruntime


def _tensor(random: Random, name: str = "") -> TensorProto:
    shape = tuple(random.randint(0, 4) for _ in range(random.randint(0, 3)))
    kind = random.choice((TensorProto.FLOAT, TensorProto.INT64, random.choice(KINDS)))
    value = array(random, shape, helper.tensor_dtype_to_np_dtype(kind), random.random() < 0.3)
    return numpy_helper.from_array(value, name)


def _weight(model: ModelProto, random: Random, _: ModelProto) -> None:
    """Change values, shape or type of an initializer, or make one of an input."""
    graph = _graph(model, random)
    if not graph.initializer or random.random() < 0.5:
        if not graph.input:
            return
        value = random.choice(graph.input)
        kind = value.type.tensor_type
        dims = [d.dim_value for d in kind.shape.dim]
        if kind.elem_type not in KINDS or not all(0 <= d < 9 for d in dims):
            return
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        new = array(random, tuple(dims), dtype, random.random() < 0.5)
        graph.initializer.append(numpy_helper.from_array(new, value.name))
        if random.random() < 0.7:
            graph.input.remove(value)
        return
    tensor = random.choice(graph.initializer)
    if random.random() < 0.4:
        tensor.CopyFrom(_tensor(random, tensor.name))
    elif tensor.data_type in KINDS and all(0 <= d < 999 for d in tensor.dims):
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if np.prod(tensor.dims, dtype=float) <= 10_000:
            value = array(random, tuple(tensor.dims), dtype, True)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def _typed(model: ModelProto, random: Random, _: ModelProto) -> None:
    """Declare another type or shape of an input."""
    graph = _graph(model, random)
    if not graph.input:
        return
    kind = random.choice(graph.input).type.tensor_type
    dims = kind.shape.dim
    change = random.randrange(5)
    if change == 0:
        kind.elem_type = random.choice(KINDS)
    elif change == 1 and dims:
        dims[random.randrange(len(dims))].dim_value = integer(random) % 2**63
    elif change == 2 and dims:
        dims[random.randrange(len(dims))].dim_param = random.choice("abn?")
    elif change == 3 and dims:
        del dims[random.randrange(len(dims))]
    else:
        dims.add().dim_value = random.randint(0, 4)


def _version(model: ModelProto, random: Random, _: ModelProto) -> None:
    """Import another version of an operator set."""
    if model.opset_import:
        entry = random.choice(model.opset_import)
        entry.version = random.randint(1, 26) if random.random() < 0.9 else random.choice(POWERS)


def _grafted(model: ModelProto, random: Random, other: ModelProto) -> None:
    """Append nodes of another model, which read values of this one."""
    graph = model.graph
    names = [value.name for value in (*graph.input, *graph.initializer)]
    names += [name for node in graph.node for name in node.output]
    for node in other.graph.node[:3]:
        new = graph.node.add()
        new.CopyFrom(node)
        for i, name in enumerate(node.input):
            new.input[i] = f"{name}_" if f"{name}_" in names else random.choice(names or [""])
        new.output[:] = [f"{name}_" for name in node.output]
        names += new.output
    if graph.node and graph.node[-1].output and graph.output:
        graph.output[0].CopyFrom(helper.make_empty_tensor_value_info(graph.node[-1].output[0]))
    imported = {entry.domain for entry in model.opset_import}
    model.opset_import.extend(e for e in other.opset_import if e.domain not in imported)


def _nested(model: ModelProto, random: Random, _: ModelProto) -> None:
    """Put a node into the branches of an If, the body of a Loop, or a function."""
    graph = _graph(model, random)
    nodes = [node for node in graph.node if node.output and all(node.output)]
    if not nodes:
        return
    node = random.choice(nodes)
    inner, outputs = NodeProto(), [*node.output]
    inner.CopyFrom(node)
    inner.output[:] = [f"{name}_inside" for name in outputs]
    results = [helper.make_empty_tensor_value_info(name) for name in inner.output]
    kind = random.randrange(3)
    if kind == 0:
        body = helper.make_graph([inner], "branch", [], results)
        branches = {"then_branch": body, "else_branch": body}
        flag = numpy_helper.from_array(np.array(random.random() < 0.5), "flag")
        graph.initializer.append(flag)
        node.CopyFrom(helper.make_node("If", ["flag"], outputs, **branches))
    elif kind == 1:
        counter = helper.make_tensor_value_info("i", TensorProto.INT64, [])
        go = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
        body = helper.make_graph([inner], "body", [counter, go], [go, *results])
        count = numpy_helper.from_array(np.array(random.randint(0, 3)), "count")
        condition = random.choice(("", "yes"))  # without one, onnx.reference runs no iteration
        if condition:
            graph.initializer.append(numpy_helper.from_array(np.array(True), condition))
        graph.initializer.append(count)
        node.CopyFrom(helper.make_node("Loop", ["count", condition], outputs, body=body))
    else:
        name, inputs = f"fn{len(model.functions)}", [*dict.fromkeys(filter(None, node.input))]
        function = helper.make_function(
            "f", name, inputs, [*inner.output], [inner], [*model.opset_import]
        )
        model.functions.append(function)
        node.CopyFrom(helper.make_node(name, inputs, outputs, domain="f"))
        model.opset_import.append(helper.make_opsetid("f", 1))


GENTLE = [_attribute, _attribute, _weight, _weight, _typed, _version, _nested, _wired]
MUTATIONS = [*GENTLE, _field, _field, _wired, _renamed, _grafted]

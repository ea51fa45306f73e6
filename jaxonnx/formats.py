"""Formats: the ways in which a network lies on disk, for `jaxonnx.load` and `Model.save`.

A `Format` finds a network and reads it as a `File`, whose `Companion` is what lies beside the graph
and is saved with it. `register` makes a subclass of `Format` one of those that `load` knows, and
`read_proto` makes a `File` of a ModelProto.
"""

from jaxonnx._io.formats import register
from jaxonnx._io.protocol import Companion, File, Format
from jaxonnx._io.read import read_proto

__all__ = ["Companion", "File", "Format", "read_proto", "register"]

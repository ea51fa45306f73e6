"""`Format`: finds, reads and writes a network; `Companion`: the files beside its graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from onnx import ModelProto

from jaxonnx.errors import InputError, ModelError

Graph = Callable[[], ModelProto]
Weights = Callable[[], Mapping[str, np.ndarray]]
"""Makes the graph or the tensors to write, when a format asks for them."""


class Companion:
    """The files beside the graph of a network, which are saved with it; here none.

    A format that reads more than a graph has a subclass, an instance of which stays with the model.
    """

    def __init_subclass__(cls, **named: Any) -> None:
        """Check that a class that accepts paths writes them."""
        super().__init_subclass__(**named)
        if cls.accepts is not Companion.accepts and cls.save is Companion.save:
            raise InputError(
                f"{cls.__name__} accepts paths, and has no save, which writes them: define "
                "save(path, graph, classes=())"
            )

    @property
    def folder(self) -> Any:
        """The folder of a language model (configuration, tokenizer), if the file lies in one."""
        return None

    @property
    def padding_token(self) -> int | None:
        """The token that fills up rows of tokens; None if it is not known."""
        return None

    @property
    def image_settings(self) -> Mapping[str, Any]:
        """Keys of `preprocess` for images that the files give: "mean", "std", "labels"..."""
        return {}

    def freezes(self, name: str) -> bool:
        """Check whether a parameter is frozen, unless `trainable` names it."""
        return False

    def with_scores(self, function: str, classes: Sequence[str]) -> Companion:
        """Return the companion of a network after a training.

        Args:
          function: the function of the outputs: "Softmax", "Sigmoid", or "" for numbers.
          classes: as of `save`.
        """
        return self

    def accepts(self, path: str | os.PathLike[str]) -> bool:
        """Check whether `save` writes this path; otherwise the graph is saved alone."""
        return False

    def save(self, path: str | os.PathLike[str], graph: Graph, classes: Sequence[str] = ()) -> None:
        """Write a network with other weights, and the files beside it.

        Args:
          path: one that `accepts`.
          graph: a function that returns the ModelProto.
          classes: the names of its classes; empty if they are not known.

        Raises:
          OSError: a file cannot be read or written.
        """
        raise NotImplementedError


ALONE = Companion()
"""The companion of a network that lies alone."""


class File(NamedTuple):
    """A network as it was read (`read_proto`).

    Attributes:
      proto: the graph. Its named tensors hold no data.
      tensors: every initializer, every tensor of a Constant node and every Identity over one of
        these, by the name of the value.
      companion: the files beside it.
    """

    proto: ModelProto
    tensors: dict[str, np.ndarray]
    companion: Companion = ALONE


class Format:
    """A way in which a network lies on disk, or in memory.

    A subclass says which sources of `jaxonnx.load` are of the format (`find`: by default the files
    with its `suffix`), and reads what that returns (`read`). If it can be written too (`write`),
    `Model.save` chooses it by the suffix of the path. What lies beside the graph is a `Companion`
    of the `File` that it reads, which `Model.save` asks first.

    `register` makes it one of the formats that `jaxonnx.load` and `Model.save` know.
    """

    form: ClassVar[str] = ""
    """The sources of this format, for errors."""
    suffix: ClassVar[str] = ""
    """The ending of paths of files in this format."""
    choice: ClassVar[str] = ""
    """The argument of `load` that chooses one of several networks of a source: "variant" or
    "checkpoint"."""
    takes: ClassVar[Collection[str]] = ()
    """Those of the arguments "external_data" and "sparse" of `Model.save` that `write` takes."""
    has_graph: ClassVar[bool] = True
    """Whether files have a graph, or weights alone."""
    replaces_inputs: ClassVar[bool] = False
    """Whether weights may have the names of inputs of the graph, and have copies once."""

    def find(self, source: Any, choice: str | None) -> Any:
        """Find the network that a source means, without reading its weights.

        Args:
          source: as `load` takes it.
          choice: the argument that `self.choice` names.

        Returns:
          What `read` takes; None if the source is of another format.

        Raises:
          InputError, ModelError: the source is of this format, and has no network, or several.
        """
        fits = isinstance(source, str | os.PathLike) and Path(source).suffix == self.suffix
        return check_exists(source) if self.suffix and fits else None

    def read(self, place: Any) -> File:
        """Read a network.

        Args:
          place: the result of `find`.

        Raises:
          ModelError: it is corrupt, truncated or malformed, or has no graph.
          UnsupportedError: the IR or an opset is newer than the installed `onnx` package knows.
          OSError: a file cannot be read.
        """
        raise ModelError(
            f"'{place}' has weights, but no graph: give it to the file of the graph, "
            f"jaxonnx.load('net.onnx', weights={str(place)!r})"
        )

    def read_weights(self, place: Any) -> dict[str, np.ndarray]:
        """Read the weights alone, by name, as for `load(weights=)`."""
        return self.read(place).tensors

    def write(self, path: Path, graph: Graph, weights: Weights, **options: bool) -> None:
        """Write a network; if that fails, the file that was at `path` stays as it was.

        Args:
          path: one with `suffix`.
          graph: a function that returns the ModelProto.
          weights: a function that returns parameters and state, by name.
          options: those that `takes` names, where they are set.

        Raises:
          OSError: the path cannot be written.
        """
        raise InputError(f"'{path}': files of this format are read, and not written")


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Check whether a path is a folder, or says that it is to be one."""
    return os.fspath(path).endswith(("/", os.sep)) or os.path.isdir(path)


def check_exists(path: str | os.PathLike[str], expected: str = "an .onnx file") -> Path:
    """Return the path of a file.

    Raises:
      ModelError: the path is not a file.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"'{path}' is not a file; give the path of {expected}")
    return path

"""How data becomes batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from jaxonnx._arguments.declare import Argument


class DataArguments(TypedDict, total=False):
    """How data becomes batches."""

    batch_size: Annotated[int | None, Argument(form="count")]
    """The number of examples in a batch; 32 by default, or what the model's inputs are fixed to.

    It applies to data in one piece; batches of an iterable are taken as they are."""
    fixed: Annotated[
        Mapping[str, Any] | None,
        Argument(
            form="fills",
            resume=True,
            needs_loss=True,
            words="The value of an input that is the same for all examples",
        ),
    ]
    """The values of inputs that are the same for all examples, by input name, like {"fmin": 50.0}.

    They hold in training, validation and evaluation, and are no part of the data. What has one axis
    less than the input, whose first axis is open, is repeated for each example. The saved file has
    all its inputs (`Model.with_fixed_inputs`)."""
    batching: Annotated[Mapping[str, None] | None, Argument(resume=True)]
    """The inputs that have no axis of examples, like {"nodes": None, "edges": None} for a graph.

    Each batch passes them whole, beside inputs and targets that have as many rows as there are
    examples; losses and weights count the rows of the targets. Batches of an iterable may have
    other sizes each, for which a program is compiled, and nothing fills them up. Of data in one
    piece such an input goes with every batch; if all inputs are such, the data are one batch in the
    order that they have."""
    pad: Annotated[
        Mapping[str, Any] | None,
        Argument(
            form="fills", resume=True, words="The value that pads short sequences of an input"
        ),
    ]
    """The values that pad sequences of unequal length, by input name, like {"input_ids": 1}.

    0 by default. The name of the targets ("y", "targets" or "labels" if there is one) sets
    theirs; labels are padded with the `ignore_index` of the loss, or -100."""
    length_buckets: Annotated[
        int | Sequence[int] | None,
        Argument(form="widths", resume=True, words="The widths that sequences are padded to"),
    ]
    """The widths that sequences are padded to, like (32, 64, 128), or one width.

    A batch has the narrowest width that its longest example fits into. With it, sequences of
    equal length are padded as well. By default powers of two from 8 on, of which the last is
    cut to the longest example of the data; or the length that the file is fixed to."""
    preprocess: Annotated[Mapping[str, Any] | None, Argument()]
    """How the images of a folder become inputs, or texts become tokens: a dict.

    Of images it stands in the place of the file's metadata.

    It has any of "scale", "mean", "std" ((pixel * scale - mean) / std, for pixels from 0 to
    255), "order" ("RGB" or "BGR"), "crop" (the share of an image's sides that its middle has, 1
    by default; 0.875 where 224 of 256 are cut), "size" ((height, width), for a network that
    takes any), and "labels" (the classes in the order of the outputs; otherwise those of the
    file if it has them all, or the folders sorted by name). "augment" is for training only:
    "crop" cuts out random parts of the images, "flip" mirrors half of them; or a list of both,
    or a dict with the least share of the area and the share that is mirrored, like {"crop":
    0.35, "flip": 0.5} (0.08 for "crop" by default). It depends on `seed`, epoch and batch only.
    "workers" threads decode (as many as there are processors, up to 16), and "memory" bounds
    the bytes of decoded images that are kept (2**30); others are decoded again in each epoch.
    Images that cannot be read are left out, with a warning. The saved file has all but
    "augment", "workers" and "memory" in its metadata, for `jaxonnx classify` and later
    training.

    Of texts it has any of "max_length" (tokens of an example at most, by default 1024, or the
    positions of the model if these are fewer), "long" (what longer texts are: "cut", "split" into
    several examples, or "refuse"; by default plain texts are split and others cut, and
    `history.notes` counts them), "loss" ("completions", the default, or "all" tokens) and "pack"
    (True joins texts to rows of at most "max_length" tokens, none of which sees another; a file
    that cannot express it is refused)."""

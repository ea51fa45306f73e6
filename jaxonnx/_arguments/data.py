"""How data is turned into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from jaxonnx._arguments.declare import Argument


class DataArguments(TypedDict, total=False):
    """The arguments of batches: their size, fixed inputs, padding, images and texts."""

    batch_size: Annotated[int | None, Argument(form="N", least=1)]
    """The number of examples per batch; defaults to 32, or to the batch size that the file fixes.

    Batches of an iterable are taken as they are."""
    fixed: Annotated[
        Mapping[str, Any] | None,
        Argument(
            form="NAME=N...",
            expected="a dict by input name",
            resume=True,
            needs_loss=True,
            words="The value of an input that is the same for all examples",
        ),
    ]
    """Values of inputs that are the same for all examples, by input name, like {"fmin": 50.0}.

    They are used in training, validation and evaluation, and are not part of the data. If the first
    axis of an input is open, a value with one axis less is repeated for each example. The saved
    file keeps all its inputs (`Model.with_fixed_inputs`)."""
    batching: Annotated[
        Mapping[str, None] | None,
        Argument(
            form="NAME...",
            expected="a dict by input name, with None for each input without an axis of examples, "
            "like {'edges': None}",
            excludes=("mesh",),
            reason="passes inputs whole, and mesh= splits batches: leave one of the two out",
            resume=True,
            words="Inputs without an axis of examples, by name",
        ),
    ]
    """Inputs without an axis of examples, like {"nodes": None, "edges": None} for a graph.

    Each batch passes them whole. The other inputs and the targets have one row per example, and
    losses and weights count the rows of the targets. Batches of an iterable may differ in size: a
    program is compiled for each size, and no batch is filled up. With arrays, such an input is
    passed with every batch. If no input has an axis of examples, the arrays are one batch and are
    not shuffled."""
    pad: Annotated[
        Mapping[str, Any] | None,
        Argument(
            form="NAME=N...",
            resume=True,
            words="The value that pads an input (default: the padding token of the folder, or 0)",
        ),
    ]
    """Values that pad sequences of unequal length, by input name, like {"input_ids": 1}.

    The default for tokens is the padding token of the model's folder, else 0, and 0 for other
    inputs. If padding changes the outputs of a text, the data are refused; with a value for its
    tokens here, this is a warning. Targets have an entry of their own, by their name ("y",
    "targets" or "labels" if the data has one of these). Labels are padded with the `ignore_index`
    of the loss by default, or with -100."""
    length_buckets: Annotated[
        int | Sequence[int] | None,
        Argument(
            form="N,...",
            expected="a width or several, like (32, 64, 128)",
            resume=True,
            words="The widths that sequences are padded to",
        ),
    ]
    """Widths to pad sequences to, like (32, 64, 128), or one width.

    A batch is padded to the narrowest width that holds its longest example. With this argument,
    sequences of equal length are padded as well. The default is the length that the file fixes, if
    it fixes one. Otherwise it is the powers of two from 8 on, the last of them cut to the longest
    example of the data."""
    columns: Annotated[
        Mapping[str, str] | None,
        Argument(
            form="NAME=NEW...",
            expected="a dict from the names in the data to new ones, like {'question': 'prompt'}",
            words="The new name of a column, or of a role of messages",
        ),
    ]
    """New names of columns by those in the data, like {"question": "prompt"}.

    For chats they also rename keys and roles of messages: {"dialog": "messages", "speaker": "role",
    "utterance": "content", "agent": "assistant"}."""
    preprocess: Annotated[Mapping[str, Any] | None, Argument()]
    """How images become inputs, or texts become tokens: a dict of the keys below.

    For images, these keys replace the preprocessing in the metadata of the file:

    * "scale", "mean", "std": an input is (pixel * scale - mean) / std, with pixels from 0 to 255.
    * "order": the order of the channels, "RGB" or "BGR".
    * "crop": the fraction of each side of the image that is kept, around its center. 1 by default;
      0.875 cuts 224 of 256 pixels.
    * "size": (height, width), for a network that accepts any size.
    * "labels": the names of the classes, in the order of the outputs. The default is the names in
      the file if it has all of them, else the names of the folders, sorted.
    * "augment": random changes in training only. "crop" cuts out a random part, "flip" mirrors half
      of the images; or a list of both. A dict sets the least fraction of the area (0.08 by default)
      and the probability of mirroring, like {"crop": 0.35, "flip": 0.5}. The changes depend on
      `seed`, epoch and batch only.
    * "workers": the number of threads that decode; by default the number of processors, at most 16.
    * "memory": the bytes of decoded images to keep, 2**30 by default. Other images are decoded
      again in each epoch.

    Images that cannot be read are skipped, with a warning. The saved file has all keys but
    "augment", "workers" and "memory" in its metadata, for `jaxonnx classify` and later training.

    For texts:

    * "max_length": the maximum number of tokens per example. The default is 1024, or the number of
      positions of the model if that is smaller.
    * "long": "cut" truncates longer texts, "split" makes several examples of one, "skip" leaves
      them out, "refuse" raises.
      Parts of which the loss counts no token are left out. By default plain texts are split and
      others are cut; `history.notes` has the counts.
    * "loss": "completions" (the default) or "all": the tokens that the loss counts.
    * "pack": True joins texts to rows of at most "max_length" tokens. Texts in one row do not
      attend to each other. Raises if the file cannot express this."""

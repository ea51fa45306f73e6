"""Let a decoder read several texts in a row (`preprocess={"pack": True}`)."""

import numpy as np

from jaxonnx._data.language_models import token_input, vocabulary
from jaxonnx._data.padding import CLOSE
from jaxonnx._data.ragged import masks_and_positions
from jaxonnx._rewrite.network import enter
from jaxonnx.errors import TrainingError
from jaxonnx.model import Model
from jaxonnx.views import PackedRows, find_packing


def take_packed_rows(model: Model) -> Model:
    """Return a decoder that takes several texts in a row, none of which sees another.

    Proved by what it gives for a text alone and behind another one.

    Raises:
      TrainingError: the file cannot tell the texts of a row apart.
    """
    way_out = "leave preprocess={'pack': True} out: short texts are then batched by their length"
    packing = find_packing(model.graph, *masks_and_positions(model.inputs))
    if packing is None:
        raise TrainingError(
            "the file cannot tell the texts of a row apart: it has neither GroupQueryAttention, "
            f"nor positions beside a mask of queries and keys; {way_out}"
        )
    changed = enter(model, packing)
    if (distance := _leak(changed, packing)) > CLOSE[model.outputs[0].dtype == np.float32]:
        raise TrainingError(
            "the file cannot tell the texts of a row apart: its logits of one text differ by "
            f"{distance:.1%} behind another one; {way_out}"
        )
    return changed


def _leak(model: Model, packing: PackedRows) -> float:
    """Measure the influence of a text on the logits of the next one, relative to the largest."""
    tokens = token_input(model)
    random, count = np.random.default_rng(0), vocabulary(model) or 2
    first, second = (random.integers(0, count, n) for n in (5, 6))
    rows = [(first, second), (first,), (second,)]
    columns = {
        tokens: [np.concatenate(row) for row in rows],
        packing.input: [packing.number([*map(len, row)]) for row in rows],
    }
    outputs = model.predict(columns, batch_size=3, length_buckets=11, progress=False)
    logits = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs
    pairs = zip(logits, (11, 5, 6), strict=True)  # a file that declares one step gives all, padded
    both, *alone = (np.asarray(x[:n], np.float32) for x, n in pairs)
    return float(np.abs(both - np.concatenate(alone)).max() / np.abs(both).max())

"""Products with matrices in few bits, whose codes stay as they are: nodes make floats of them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxonnx.onnx_out._nodes import Nodes, Tensor
from jaxonnx.onnx_out._rule_table import primitive


@primitive("packed_product")
def packed_product(g, x, *arrays, form):
    (product,) = g.run(form.dense, x, *(_add_codes(g, array) for array in arrays))
    return product


def _add_codes(g: Nodes, array: Any) -> Any:
    """Add an array of integer codes as an initializer; return other arrays unchanged.

    As a tensor it is not a known value any more, so that the floats which nodes compute from the
    codes are not folded into the file.
    """
    if not isinstance(array, np.ndarray) or not jnp.issubdtype(array.dtype, jnp.integer):
        return array
    kind = array.dtype
    if kind.itemsize == 1:  # also of less than a byte, which few operators take
        kind = np.dtype(np.uint8 if kind.name.startswith("uint") else np.int8)
    named = g.main.constants  # by the array of the file: forward and backward pass read one tensor
    if id(array) not in named:
        name = g.main.writer.constant("codes", array.astype(kind), kind)
        named[id(array)] = name, array
    return Tensor(named[id(array)][0], array.shape, kind)

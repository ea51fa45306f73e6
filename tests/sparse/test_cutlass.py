"""The operands of CUTLASS, as PyTorch's own conversion writes them (tests/data/cutlass.npz)."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxonnx import SparsityError, sparse
from tests.support.paths import DATA

TYPES = {"half": np.float16, "bf16": jnp.bfloat16, "int8": np.int8}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("axis", [1, 0])
def test_operands_are_those_of_pytorch(name, axis):
    """torch.sparse._semi_structured_conversions.sparse_semi_structured_from_dense_cutlass."""
    golden = dict(np.load(DATA / "cutlass.npz"))
    dense = golden[f"{name}.dense"].astype(TYPES[name])
    w = dense if axis else dense.T
    values, metadata = sparse.to_cutlass(sparse.pack(w, axis=axis))
    np.testing.assert_array_equal(values.astype(np.int8), golden[f"{name}.values"])
    np.testing.assert_array_equal(metadata.view(f"i{metadata.itemsize}"), golden[f"{name}.meta"])
    back = sparse.from_cutlass(values, golden[f"{name}.meta"], axis=axis)
    np.testing.assert_array_equal(np.asarray(sparse.unpack(back)), w)
    assert back.shape == w.shape


def test_what_the_hardware_does_not_take_is_refused():
    w = sparse.prune({"w": jnp.ones((32, 32), jnp.float16)})["w"]
    packed = sparse.pack(w)
    values, metadata = sparse.to_cutlass(packed)
    with pytest.raises(SparsityError, match="got float32"):
        sparse.to_cutlass(sparse.pack(np.asarray(w, np.float32)))
    with pytest.raises(SparsityError, match="16 x 32: CUTLASS takes multiples of 32 rows and 32"):
        sparse.to_cutlass(sparse.pack(w[:16]))
    with pytest.raises(SparsityError, match="takes 2:4 matrices, not 1:4"):
        sparse.to_cutlass(sparse.pack(sparse.prune({"w": w}, "1:4")["w"], pattern="1:4"))
    with pytest.raises(SparsityError, match="metadata of uint16"):
        sparse.from_cutlass(values, metadata[:, :1])
    with pytest.raises(SparsityError, match="metadata: "):
        sparse.from_cutlass(values, np.zeros_like(metadata))

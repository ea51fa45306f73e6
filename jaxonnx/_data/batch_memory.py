"""Reuse host memory for batches.

A fresh array of some hundred kilobytes costs more in page faults than what is written into it: of a
batch of 200 kB 140 us instead of 12. And XLA:CPU reads an array of NumPy where it is, if it begins
at a multiple of 64 bytes, which saves another copy.
"""

import math

import numpy as np

_SMALL = 2**15
"""Bytes of a batch below which reuse does not pay."""

_ALIGNED = 64
"""The alignment at which XLA:CPU reads an array of NumPy without a copy."""


class Memory:
    """A pool of memory blocks for batches of `count` rows of an array.

    A block returns to the pool when the last array that uses it is garbage collected.
    """

    def __init__(self, array: np.ndarray, count: int):
        self._array = array
        self._shape = (count, *array.shape[1:])
        self._size = math.prod(self._shape) * array.itemsize
        # `take` would copy the whole of an array whose elements do not lie in order
        in_order = array.flags.c_contiguous and not array.dtype.hasobject
        self.again = self._size >= _SMALL and in_order
        self._free: list[np.ndarray] = []

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Return `array[rows]`; the rows must be in bounds."""
        if not self.again:
            return self._array[rows]
        # with mode="raise" NumPy gathers into a buffer first, as it may fail half way
        return self._array.take(rows, axis=0, out=self.allocate(), mode="clip")

    def allocate(self) -> np.ndarray:
        """Return uninitialized memory for a batch."""
        block = np.asarray(_Lent(self._free.pop() if self._free else self._block(), self._free))
        return block.view(self._array.dtype).reshape(self._shape)

    def _block(self) -> np.ndarray:
        """Return new aligned memory for a batch, as bytes."""
        block = np.empty(self._size + _ALIGNED, np.uint8)
        start = -block.ctypes.data % _ALIGNED
        return block[start : start + self._size]


class _Lent:
    """An owner of a block, which every array on it refers to; it returns the block when it dies.

    JAX keeps the arrays that a computation reads alive until it has ended.
    """

    def __init__(self, block: np.ndarray, free: list[np.ndarray]):
        self._block, self._free = block, free
        self.__array_interface__ = block.__array_interface__

    def __del__(self):
        self._free.append(self._block)

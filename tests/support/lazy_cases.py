"""What takes long to collect, made when a test first asks for it."""

import importlib
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np


class Module:
    """A module that is imported for its first attribute."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # as pytest asks any object for, which may be a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


class Array:
    """An array that is computed when NumPy takes it for one."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, compute: Callable[[], np.ndarray]):
        self.shape, self.dtype, self._compute = shape, np.dtype(dtype), compute

    @cached_property
    def _value(self) -> np.ndarray:
        return self._compute()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._value, dtype, copy=copy)

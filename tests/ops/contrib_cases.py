"""Operators of onnxruntime alone: a case, and the numbers that cases are made of."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

DOMAIN = "com.microsoft"
rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype(np.float32)


def u8(*shape):
    return rng.integers(0, 256, shape).astype(np.uint8)


def i8(*shape):
    return rng.integers(-128, 128, shape).astype(np.int8)


def weights(*shape):
    """Weights of 7 bits: onnxruntime adds two products of 8 bits in int16 on AVX2 without VNNI."""
    return i8(*shape) // 2


def i32(*values):
    return np.array(values, np.int32)


def s(value):
    return np.array(value, np.float32)


@dataclass
class Fused:
    op: str
    inputs: list
    attributes: dict = field(default_factory=dict)
    outputs: list = field(default_factory=lambda: ["y"])
    id: str = ""
    domain: str = DOMAIN
    opset: int = 17
    atol: float = 2e-6
    shared: tuple[int, ...] = ()
    """Inputs whose buffers are those of the second output on."""
    expected: Callable | None = None
    """What onnxruntime's CPU provider lacks, from the inputs; without it onnxruntime is asked."""

    def __post_init__(self):
        self.inputs = [x if x is None else np.asarray(x) for x in self.inputs]

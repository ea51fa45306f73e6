"""Compilation with the options of XLA under which a program is fastest, and forms that rely on it.

XLA:CPU multiplies and convolves by YNNPACK. From JAX 0.11 on it carries oneDNN as well, which takes
what YNNPACK leaves: factors that are transposed, and convolutions of any rank but two. `jit` turns
it on for convolutional networks; a form that would rather have oneDNN is then written so that
YNNPACK leaves it (`uses_onednn`). A program that users compile themselves keeps the forms that suit
YNNPACK alone, and so do networks of dense layers in float32: oneDNN takes twice the time for the
gradient of a 768 x 3072 weight (Ice Lake, 1,576 rows), a step of ViT-B/16 1.15 times the time (on
Zen 4 0.985), and XLA can keep no program in its cache that calls oneDNN. Where products are rounded
to bfloat16 and the processor has units for it, all networks are compiled with oneDNN, which uses
them for convolutions and for the gradients of weights.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property, partial
from platform import machine
from typing import Any

import jax
from jax import lax

from jaxonnx.errors import warn
from jaxonnx.lowering._pieces import Pieces, cut

ONEDNN = "xla_cpu_experimental_onednn_custom_call"

_HAS_ONEDNN = jax.__version_info__ >= (0, 11) and machine() in ("x86_64", "AMD64")

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # 2026-11-28, JAX 0.12, two cores of an Intel Xeon (Ice Lake), float32: gradients of 1x1 kernels
    # 1.3 to 2.1 times as fast, convolutions written for it 1.2 to 2.6 times. YNNPACK keeps the
    # rest: `xla_cpu_experimental_ynn_fusion_type` of reductions only slows MobileNetV2 by 7 %, of
    # nothing ResNet-18 by 20 %. JAX 0.10 takes the option and has no oneDNN.
    #
    # With oneDNN, XLA also removes casts to fewer bits and back, which are a rounding (fake
    # quantization, weights of 16 bits), unless excess precision is not allowed.
    #
    # 2026-11-29, two cores of an AMD EPYC (Zen 4), products in bfloat16: steps of ResNet-50 0.83 of
    # the time, ViT-B/16 0.89, a small encoder 0.93, LeNet 0.68. Not measured on ARM, and left out.
    "cpu": {ONEDNN: True, "xla_allow_excess_precision": False} if _HAS_ONEDNN else {}
}
"""Options of the compiler by platform."""

FOR_UNITS: Mapping[str, Mapping[str, Any]] = {
    # 2026-11-30, JAX 0.12, two cores of an AMD EPYC (Zen 4): YNNPACK for reductions only. Steps of
    # ResNet-50 take 0.96 of the time, ViT-B/16 0.95, ResNet-18 0.98, a small encoder 0.99,
    # MobileNetV2 1.03 (its median 0.99), and compile in 0.7 to 0.9 of the time. In float32 steps of
    # ResNet-50 take 1.02, of ResNet-18 1.03.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
    if _HAS_ONEDNN
    else {}
}
"""Further options for products in 16 bits, on processors with units for them."""

UNSTORED = "Error writing persistent compilation cache entry .*MemoryError"
"""The warning about a program with calls of oneDNN, which XLA cannot store."""

_uses_onednn = ContextVar("_uses_onednn", default=False)


def uses_onednn() -> bool:
    """Check whether the program that is being lowered is compiled with oneDNN."""
    return _uses_onednn.get()


def keep_apart(y: Any) -> Any:
    """Keep the result of a product from what follows, in a program compiled with oneDNN.

    XLA lets oneDNN apply a maximum with zero that follows, which turns NaN into zero.
    """
    return lax.optimization_barrier(y) if uses_onednn() and isinstance(y, jax.Array) else y


@cache
def compiler_options(platform: str, units: bool = False) -> dict[str, Any]:
    """Return the options of a platform, without those that this version of JAX does not know.

    Args:
      platform: as of `jax.default_backend`.
      units: whether the program multiplies in 16 bits, by units of the processor.
    """
    options: dict[str, Any] = {}
    for table in (OPTIONS, FOR_UNITS)[: 1 + units]:
        more = {**options, **table.get(platform, {})}
        try:
            jax.jit(lambda: 0, compiler_options=more or None).lower().compile()
        except jax.errors.JaxRuntimeError:  # of another release
            left_out = ", ".join(name for name in more if name not in options)
            warn(
                f"JAX {jax.__version__} does not know these options of XLA, without which programs "
                f"may be slower: {left_out}; another release of jaxonnx may know its own"
            )
            return options
        options = more
    return options


class jit:
    """Compile a function as `jax.jit` does, on request with the options for this platform.

    Within a larger program, whose options count, it is `jax.jit`.

    Args:
      function, settings: as for `jax.jit`.
      onednn: whether to compile with oneDNN, where XLA has it.
      units: whether the program multiplies in 16 bits, by units of the processor; with `onednn`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        onednn: bool = False,
        units: bool = False,
        **settings: Any,
    ):
        self._function, self._settings = function, settings
        self._onednn, self._units = onednn, units

    @cached_property
    def _options(self) -> dict[str, Any]:
        return compiler_options(jax.default_backend(), self._units) if self._onednn else {}

    @cached_property
    def alone(self) -> Any:
        """The function by `jax.jit`, for calls whose program is compiled already."""
        return jax.jit(self._function, compiler_options=self._options or None, **self._settings)

    @cached_property
    def _within(self) -> Any:
        return jax.jit(self._function, **self._settings)

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            with self._forms():
                return self.alone(*args, **named)
        except ValueError as error:
            # what JAX says of a call within another program, for which it has no class
            if not self._options or "compiler_options" not in str(error):
                raise
        return self._within(*args, **named)

    def in_pieces(self, *args: Any, **named: Any) -> Callable[..., Any]:
        """Return the function for arguments like these; that of a deep network runs in pieces.

        The first call compiles each kind of piece. On several devices, or other platforms than CPU,
        it is the function itself.
        """
        arrays = (x for x in jax.tree.leaves((args, named)) if isinstance(x, jax.Array))
        if jax.default_backend() != "cpu" or any(len(x.sharding.device_set) > 1 for x in arrays):
            return self
        traced = self.trace(*args, **named)
        program = traced.jaxpr
        if id(program) not in self._pieces:
            donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
            pieces = cut(program, donated, partial(jit, onednn=self._onednn, units=self._units))
            self._pieces[id(program)] = program, pieces
        _, pieces = self._pieces[id(program)]
        if pieces is None:
            return self
        structure = jax.tree.structure(traced.out_info)
        static = self._settings.get("static_argnames", ())

        def call(*args: Any, **named: Any) -> Any:
            dynamic = {name: value for name, value in named.items() if name not in static}
            return structure.unflatten(pieces(jax.tree.leaves((args, dynamic))))

        return call

    @cached_property
    def _pieces(self) -> dict[int, tuple[Any, Pieces | None]]:
        """Programs and their pieces, by the identity of the program."""
        return {}

    def trace(self, *args: Any, **named: Any) -> Any:
        """Trace for `lower`; a call uses the same program."""
        with self._forms():
            return self.alone.trace(*args, **named)

    def lower(self, traced: Any) -> Any:
        """Lower a program that `trace` returned."""
        with self._forms():
            return traced.lower()

    def compile(self, traced: Any) -> jax.stages.Compiled:
        """Compile ahead of time a program that `trace` returned."""
        with self._forms():
            return traced.lower().compile()

    @contextmanager
    def _forms(self) -> Iterator[None]:
        token = _uses_onednn.set(ONEDNN in self._options)
        try:
            if _uses_onednn.get() and jax.config.jax_compilation_cache_dir:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", UNSTORED, UserWarning)
                    yield
            else:
                yield
        finally:
            _uses_onednn.reset(token)

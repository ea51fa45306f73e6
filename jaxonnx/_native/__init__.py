"""Kernels in C++, compiled by the compiler of the machine or of the wheel `ziglang`.

XLA calls them through its interface for foreign functions. Their sources are beside the modules
that use them; this folder has the headers that they share.
"""

import ctypes
import errno
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxonnx.errors import Error, warn

FOLDER = Path(__file__).parent
OPTIONS = ("-O3", "-ffp-contract=fast", "-w", "-pthread")


class CompilerError(Error):
    """Raised when a kernel cannot be compiled or loaded."""


def load_library(source: Path, others: Sequence[Path]) -> ctypes.CDLL:
    """Load the library of a source, compiled at the first use of a user.

    Args:
      source: the C++ file.
      others: files that it includes, except for the shared headers.

    Raises:
      CompilerError: there is no C++ compiler, or it fails, or what it made cannot be loaded.
    """
    library = cached_library(source, OPTIONS, others)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # a folder whose files may not be executed, a damaged file
        raise CompilerError(
            f"the kernel of {source.name} cannot be loaded ({error}): delete {library}, or name "
            "another folder in XDG_CACHE_HOME"
        ) from None


def compile_library(source: Path, options: Sequence[str], target: Path) -> None:
    """Compile a source to a shared library, with the headers of XLA's FFI.

    The compiler is `$CXX`, or `c++`, or the one of `ziglang`.

    Raises:
      CompilerError: there is no compiler, or it fails; the message has its first error.
    """
    include = (f"-I{folder}" for folder in (jax.ffi.include_dir(), FOLDER, source.parent))
    command = [*_compiler(), "-std=c++17", "-shared", "-fPIC", *include, str(source)]
    try:
        subprocess.run(
            [*command, *options, "-o", str(target)], check=True, capture_output=True, text=True
        )
    except OSError as error:
        raise CompilerError(
            f"{source.name} is compiled by {command[0]}, which is not there or does not start "
            f"({error.strerror}): install a C++ "
            "compiler and name it in the environment variable CXX, or pip install "
            "'jaxonnx[sparse-cpu]', which brings one"
        ) from None
    except subprocess.CalledProcessError as failure:
        errors = [line for line in failure.stderr.splitlines() if "error" in line]
        reason = errors[0] if errors else f"exit status {failure.returncode}"
        raise CompilerError(f"{source.name} does not compile with {command[0]}: {reason}") from None


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: `$CXX`, or `c++` if there is one, or ziglang's."""
    if chosen := os.environ.get("CXX"):
        return chosen.split()
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    has_system = any(os.access(Path(folder, "c++"), os.X_OK) for folder in folders)
    if not has_system and importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return ["c++"]


def cached_library(source: Path, options: Sequence[str], others: Sequence[Path] = ()) -> Path:
    """Return the path of a compiled source, which is compiled unless the user's cache has it.

    The cache is `$XDG_CACHE_HOME/jaxonnx`, or `~/.cache/jaxonnx`. Its key is a hash of the sources,
    the compiler, the options, the version of JAX (for its headers), the operating system and the
    architecture. The code does not depend on the model of the processor, so that machines can share
    a cache.
    """
    about = (*_compiler(), *options, jax.__version__, platform.system(), platform.machine())
    digest = hashlib.sha256("\0".join(about).encode())
    headers = (FOLDER / name for name in ("common.h", "variants.h", "vectors.inc"))
    for file in (source, *others, *headers):
        digest.update(file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "jaxonnx")
    library = cache / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    try:
        if not cache.is_absolute():  # a user without a home
            raise OSError(errno.ENOENT, "it is not an absolute path")
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=cache)
    except OSError as error:
        warn(
            f"{cache} cannot be written ({error.strerror}): each process compiles its "
            "kernels; name another folder in XDG_CACHE_HOME",
        )
        library = Path(tempfile.mkdtemp(), library.name)
        compile_library(source, options, library)
        return library
    target = Path(folder, library.name)
    try:
        compile_library(source, options, target)
        target.replace(library)  # at once: another process sees all of it or nothing
    finally:
        target.unlink(missing_ok=True)
        Path(folder).rmdir()
    return library


def is_split(context: Any) -> bool:
    """Check, in a lowering rule, whether XLA partitions the program over several devices."""
    axes = context.module_context.axis_context
    # under a shard_map XLA partitions over the mesh axes that are not manual
    if (manual := getattr(axes, "manual_axes", None)) is not None:
        return manual != frozenset(axes.mesh.axis_names)
    return getattr(axes, "num_devices", 1) > 1

"""The C++ library: found, loaded, asked for functions, and its torch operators registered. Holds no arithmetic.

A family file declares what it calls and what torch should see::

    _scale = bind("tio_scale", pointer, size, integer)          # int tio_scale(void*, int64_t, int)

    def _cpu(x): ...; _scale(x.data_ptr(), x.numel(), threads())
    scale = operator("scale(Tensor x) -> Tensor", _cpu, fake=torch.empty_like)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tio_megatron.kernels import build, families

pointer = ctypes.c_void_p
size = ctypes.c_int64
integer = ctypes.c_int
real = ctypes.c_float

ISAS = ("generic", "avx2", "avx512")
TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Element types of the kernels and their codes in the C interface."""

_REBUILD = "run: make setup, or python -m tio_megatron.kernels.build"


def _load() -> ctypes.CDLL:
    if not build.LIBRARY.exists():
        raise build.LibraryError(f"the C++ library {build.LIBRARY.name} is not built; {_REBUILD}")
    # torch is loaded already and brings libgomp: the library then shares its threads instead of starting a second set.
    try:
        library = ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise build.LibraryError(f"the C++ library {build.LIBRARY.name} cannot be loaded ({reason}): remove it, then {_REBUILD}") from error
    try:
        for name in ("tio_version", "tio_sources", "tio_isa"):
            getattr(library, name).restype = ctypes.c_char_p
        library.tio_set_isa.argtypes = [ctypes.c_char_p]
        built_from = library.tio_sources().decode()
    except AttributeError as error:
        raise build.LibraryError(f"the C++ library {build.LIBRARY.name} is another one ({error}): remove it, then {_REBUILD}") from error
    if build.SOURCES.is_dir() and built_from != build.source_hash():
        raise build.LibraryError(f"the C++ library {build.LIBRARY.name} is older than its sources; {_REBUILD}")
    return library


_library = _load()
_operators = torch.library.Library("tio", "FRAGMENT")


def version() -> str:
    """The version string of the CPU family; raised whenever the bytes of a kernel change."""
    return str(_library.tio_version().decode())


def isa() -> str:
    """The instruction set in force: ``generic``, ``avx2`` or ``avx512``. All give the same bytes."""
    return str(_library.tio_isa().decode())


def set_isa(name: str) -> None:
    """Force an instruction set for this process.

    Raises:
        ValueError: an unknown name, or one this processor does not have.
    """
    if _library.tio_set_isa(name.encode()):
        raise ValueError(f"instruction set {name!r} is not available on this processor; available are {supported_isas()}")


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    """Force an instruction set inside a ``with`` block (tests)."""
    before = isa()
    set_isa(name)
    try:
        yield
    finally:
        set_isa(before)


def supported_isas() -> list[str]:
    """The instruction sets this processor can run."""
    before = _library.tio_isa()
    try:
        return [name for name in ISAS if not _library.tio_set_isa(name.encode())]
    finally:
        _library.tio_set_isa(before)


def threads() -> int:
    """Threads a kernel may use: torch's setting."""
    return torch.get_num_threads()


def bind(name: str, *arguments: Any) -> Callable[..., int]:
    """A C function of the library. Its code is returned: 0, or above 1 for input it refuses (the caller says which); 1 raises.

    Raises:
        MemoryError: (when called) the kernel could not get its scratch memory.
    """
    function = getattr(_library, name)
    function.argtypes = list(arguments)
    function.restype = ctypes.c_int

    def call(*values: Any) -> int:
        code: int = function(*values)
        if code == 1:
            raise MemoryError(f"{name}: no memory for the kernel's scratch buffers")
        return code

    return call


def operator(schema: str, cpu: Callable[..., Any], fake: Callable[..., Any], names: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Register the torch operator ``tio::schema`` with its CPU kernel and its shape function; returns the callable operator.

    The operator then dispatches by device: other families add their kernels with :func:`.families.implement`. ``names`` are the public
    functions that check for it, where theirs is another name.
    """
    name = schema.split("(", 1)[0]
    _operators.define(schema)
    families.implement(name, "cpu", cpu, family="cpu")
    families.names(name, *names)
    torch.library.register_fake(f"tio::{name}", fake, lib=_operators)
    return getattr(torch.ops.tio, name).default


def type_code(tensor: torch.Tensor, what: str) -> int:
    """The C code of a tensor's element type.

    Raises:
        ValueError: not fp32 or bf16.
    """
    code = TYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{what}: dtype {tensor.dtype} is not supported; use torch.float32 or torch.bfloat16")
    return code


if "TIO_CPU_ISA" in os.environ:
    set_isa(os.environ["TIO_CPU_ISA"])

"""The goldens of every operator, computed by kernels in another process, which may be an emulated processor's. Started as a process of its own:

    python tests/support/far_kernels.py COMMAND...

``COMMAND`` starts a program linked from tests/kernels/core/calls.cpp and csrc/. Prints one line per operator, as in tests/golden/kernels.txt.
Operators see ordinary tensors: each call's memory is sent to the program and taken back.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from typing import Any

import torch

from tio_megatron.kernels import library


class Far:
    """Stands in for the C++ library: functions are called in the program, everything else is the library's own."""

    def __init__(self, near: ctypes.CDLL, command: list[str]) -> None:
        self._near = near
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.called: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("tio_version", "tio_sources", "tio_isa", "tio_set_isa"):
            return getattr(self._near, name)
        return _Function(self, name)

    def close(self) -> None:
        """Wait for the program's end."""
        assert self._program.stdin is not None
        self._program.stdin.close()
        assert self._program.wait(timeout=300) == 0

    def run(self, name: str, types: list[Any], values: tuple[Any, ...]) -> int:
        """One call: send its memory and arguments, take the memory back."""
        self.called[name] = self.called.get(name, 0) + 1
        call = _Call()
        whole, reals = [], []
        for kind, value in zip(types, values, strict=True):
            if kind is library.real:
                reals.append(int.from_bytes(struct.pack("<f", value), "little"))
            elif kind is library.pointer and value is not None:
                whole += call.argument(value)
            else:
                whole += (-1, int(value or 0))
        message = [_longs(len(name)), name.encode(), _longs(len(call.buffers))]
        for base, size in call.buffers:
            message += [_longs(base % 64, size), ctypes.string_at(base, size)]
        message += [_longs(len(call.inside) // 4, *call.inside), _longs(len(whole) // 2, *whole), _longs(len(reals), *reals)]
        stdin, stdout = self._program.stdin, self._program.stdout
        assert stdin is not None and stdout is not None
        stdin.write(b"".join(message))
        stdin.flush()
        (code,) = struct.unpack("<q", _exactly(stdout, 8))
        for base, size in call.buffers:
            found = _exactly(stdout, size)
            if base not in call.keeps:
                ctypes.memmove(base, found, size)
        SEEN.clear()
        return int(code)


class _Function:
    def __init__(self, far: Far, name: str) -> None:
        self._far, self._name = far, name
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *values: Any) -> int:
        return self._far.run(self._name, self.argtypes, values)


class _Call:
    """The memory of one call: storages of tensors, and arrays made for it."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, int]] = []
        self.inside: list[int] = []
        self.keeps: set[int] = set()
        """Arrays of pointers: the program's own would come back."""

    def argument(self, value: Any) -> tuple[int, int]:
        """Buffer and offset of a pointer argument."""
        if not isinstance(value, ctypes.Array):
            return self.place(int(value))
        base = ctypes.addressof(value)
        index = self._buffer(base, ctypes.sizeof(value))
        if value._type_ is ctypes.c_void_p:
            self.keeps.add(base)
            for number, pointed in enumerate(value):
                if pointed is not None:
                    self.inside += [index, 8 * number, *self.place(pointed)]
        return index, 0

    def place(self, pointer: int) -> tuple[int, int]:
        """Buffer and offset of an address inside a tensor."""
        for base, size in SEEN.values():
            if base <= pointer < base + max(size, 1):
                return self._buffer(base, size), pointer - base
        raise AssertionError(f"a pointer that no tensor gave: {pointer:#x}")

    def _buffer(self, base: int, size: int) -> int:
        if (base, size) not in self.buffers:
            self.buffers.append((base, size))
        return self.buffers.index((base, size))


SEEN: dict[int, tuple[int, int]] = {}
"""Storages whose addresses were asked for since the last call: address -> where they begin and their bytes."""
_address = torch.Tensor.data_ptr


def _asked(tensor: torch.Tensor) -> int:
    pointer = _address(tensor)
    storage = tensor.untyped_storage()
    SEEN[pointer] = (storage.data_ptr(), storage.nbytes())
    return pointer


def _longs(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _exactly(stream: Any, size: int) -> bytes:
    found = stream.read(size)
    assert len(found) == size, "the program ended early"
    return bytes(found)


def main(command: list[str]) -> None:
    """Print the goldens, and to stderr how many functions were called how often."""
    far = Far(library._library, command)
    library._library = far  # type: ignore[assignment]
    torch.Tensor.data_ptr = _asked  # type: ignore[method-assign]
    # Kernels bind their functions when they are imported: after this.
    from tests.golden import kernels as golden

    for name, value in golden.hashes().items():
        print(f"{value}  {name}")
    far.close()
    print(f"{len(far.called)} functions, {sum(far.called.values())} calls", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What triton-ascend makes of our kernels, run on this CPU: its linalg goes on through MLIR's own passes and LLVM to machine code.

That tests tiles, masks and the order of loops as the Ascend compiler receives them. It is not the cube: how that adds inside one instruction stays unknown.
Needs Debian's ``mlir-19-tools`` and ``llvm-19``, or their ``bin`` folder in the variable ``MLIR_BIN``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from tests.npu.lower import lower

PASSES = (
    "--allow-unregistered-dialect",
    "--canonicalize",
    "--cse",
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=bufferize-function-boundaries allow-return-allocs-from-loops",
    "--canonicalize",
    "--convert-linalg-to-loops",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)

COPY = """
#include <stdint.h>
#include <string.h>
typedef struct { int64_t rank; void *it; } Any;
typedef struct { char *base, *data; int64_t offset, rest[]; } Memory; /* rest: sizes, then strides */
void memrefCopy(int64_t bytes, Any *from, Any *to) {
    int64_t rank = from->rank, at[8] = {0};
    Memory *x = from->it, *y = to->it;
    for (int64_t i = 0; i < rank; i++) if (!x->rest[i]) return;
    for (;;) {
        int64_t a = x->offset, b = y->offset;
        for (int64_t i = 0; i < rank; i++) { a += at[i] * x->rest[rank + i]; b += at[i] * y->rest[rank + i]; }
        memcpy(y->data + b * bytes, x->data + a * bytes, bytes);
        int64_t i = rank - 1;
        while (i >= 0 && ++at[i] == x->rest[i]) at[i--] = 0;
        if (i < 0) return;
    }
}
"""
"""The one function that MLIR's code asks of its run time: a copy between strided places."""


def tools() -> Path | None:
    """Where mlir-opt, mlir-translate and llc 19 are, if they are."""
    for folder in (os.environ.get("MLIR_BIN"), "/usr/lib/llvm-19/bin"):
        if folder and all((Path(folder) / name).exists() for name in ("mlir-opt", "mlir-translate", "llc")):
            return Path(folder)
    return None


def plain(text: str) -> str:
    """Without what only the Ascend compiler reads: marks, and attributes of its dialects."""
    text = re.sub(r"^\s*annotation\.mark .*\n", "", text, flags=re.M)
    text = re.sub(r" \{(?:tt|hivm)\.[^}]*\}", "", text)
    return re.sub(r" attributes \{[^{}]*\} \{", " {", text)


def built(text: str, name: str, folder: Path) -> Any:
    """The kernel as a function of this process."""
    where = tools()
    base = folder / f"{name}_{len(list(folder.iterdir()))}"
    source, lowered, llvm, thing, library = (base.with_suffix(end) for end in (".mlir", ".low.mlir", ".ll", ".o", ".so"))
    source.write_text(plain(text))
    copy = base.with_suffix(".c")
    copy.write_text(COPY)
    for command in (
        [where / "mlir-opt", source, *PASSES, "-o", lowered],
        [where / "mlir-translate", "--mlir-to-llvmir", lowered, "-o", llvm],
        [where / "llc", "-O2", "-fp-contract=off", "-mcpu=native", "-relocation-model=pic", "-filetype=obj", llvm, "-o", thing],
        ["gcc", "-shared", "-fPIC", "-O1", "-o", library, thing, copy, "-lm"],
    ):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{Path(command[0]).name}: {done.stderr[:2000]}")
    function = getattr(ctypes.CDLL(str(library)), name)
    function.restype = None
    return function


def memory(tensor: torch.Tensor | None) -> list[Any]:
    """A memref of one axis: two pointers, offset, size, stride."""
    at = ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())
    return [at, at, ctypes.c_int64(0), ctypes.c_int64(0 if tensor is None else 1 << 40), ctypes.c_int64(1)]


@contextmanager
def executing(folder: Path) -> Iterator[None]:
    """Inside, a launch of a Triton kernel runs what triton-ascend made of it, program by program."""
    kept: dict[Any, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | {name: value for name, value in kwargs.items() if name in self.arg_names}
        fixed = tuple((p.name, given[p.name]) for p in self.params if p.is_constexpr)
        types = tuple(getattr(given[p.name], "dtype", type(given[p.name])) for p in self.params if not p.is_constexpr)
        key = (self.__name__, self.__module__, fixed, types)
        if key not in kept:
            kept[key] = built(lower(self, args, kwargs), self.__name__, folder)
        values: list[Any] = [*memory(None), *memory(None)]
        for parameter in self.params:
            value = given[parameter.name]
            if parameter.is_constexpr:
                continue
            if isinstance(value, torch.Tensor):
                values += memory(value)
            else:
                values.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int32(value))
        size = [*grid, 1, 1][:3]
        for place in itertools.product(*(range(n) for n in size)):
            kept[key](*values, *(ctypes.c_int32(n) for n in (*size, *place)))

    with mock.patch.object(JITFunction, "run", run):
        yield

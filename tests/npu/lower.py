"""Our Triton kernels through triton-ascend, for a 910B: to linalg, and by bishengir-compile to HIVM, as each would be launched for Qwen3-30B-A3B.

``make lower-ascend`` runs it in the environment of ``make test-ascend`` and writes ``lowered_triton_ascend.txt``. Nothing runs on a device. HIVM is the
last form that public packages reach: machine code needs CANN's ``hivmc``. A row says: the launch, the kernel, its linalg operations (or why there
are none), and whether HIVM was reached (or the compiler's first complaint).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from tio_megatron.kernels import triton_family, triton_report

TARGET = GPUTarget("npu", "Ascend910B1", 0)
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
FILE = Path(__file__).with_name("lowered_triton_ascend.txt")
BY_VENDOR = ("attention", "attention_paged", "write_pages", "rms_norm", "rms_norm of heads", "add_rms_norm", "grouped")
"""Launches that the family leaves to torch_npu's operators (attention's gradient too): how they lower is only worth knowing."""
ARRIVED = "External hivmc run fails"
"""What bishengir-compile says when all of its own passes are done and only CANN's compiler is missing."""


def lower(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The linalg of ``fn[grid](*args, **kwargs)``."""
    given = dict(zip(fn.arg_names, args, strict=False)) | {name: value for name, value in kwargs.items() if name in fn.arg_names}
    signature, constants = {}, {}
    for parameter in fn.params:
        value = given[parameter.name]
        if parameter.is_constexpr:
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    backend = make_backend(TARGET)
    options = backend.parse_options({name: value for name, value in kwargs.items() if name == "enable_fp_fusion"})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn, signature, constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": TARGET, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    return str(stages["ttadapter"](stages["ttir"](module, metadata), metadata))


def hivm(text: str) -> str:
    """``HIVM``, or the first complaint of bishengir-compile."""
    compiler = Path(importlib.util.find_spec("ascendnpuir").origin).parent / "bin" / "bishengir-compile"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.mlir"
        source.write_text(text)
        options = ["--enable-hfusion-compile=true", "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true", f"--target={TARGET.arch}"]
        done = subprocess.run([str(compiler), str(source), *options, "-o", f"{folder}/kernel.o"], capture_output=True, text=True, timeout=300)
    if ARRIVED in done.stderr:
        return "HIVM"
    said = [line for line in done.stderr.splitlines() if " error: " in line and "Failed to run" not in line]
    return "no HIVM: " + (re.sub(r"^.*? error: ", "", said[0])[:110] if said else f"status {done.returncode}")


def table() -> Iterator[str]:
    """One row for each kernel and launch."""
    for what, launch in triton_report.launches().items():
        found: list[tuple[str, str]] = []

        def run(self: Any, *args: Any, grid: Any, warmup: bool, found: list[tuple[str, str]] = found, **kwargs: Any) -> None:
            try:
                text = lower(self, args, kwargs)
                told = f"linalg {len(re.findall(r'linalg[.]', text)):>3}  {hivm(text)}"
            except subprocess.CalledProcessError as error:  # its words hold a path of this machine
                told = f"no linalg: {Path(error.cmd[0]).name} ends with status {error.returncode}"
            except Exception as error:  # a compiler may fail in any way; the row says how
                told = f"no linalg: {type(error).__name__}: {' '.join(str(error).split())[:110]}"
            found.append((self.__name__, told))

        with mock.patch.object(JITFunction, "run", run), mock.patch.object(triton_family, "small", lambda device: True):  # as on an NPU
            launch()
        note = "  (torch_npu's on an NPU)" if what in BY_VENDOR or what == "attention_backward" else ""
        yield from (f"{what:<34} {name:<16} {told}{note}" for name, told in dict.fromkeys(found))


if __name__ == "__main__":
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("triton-ascend", "ascendnpu-ir"))
    lines = [f"# {versions}, {TARGET.arch}: lowered, nothing has run. make lower-ascend"]
    for line in table():
        lines.append(line)
        print(line, flush=True)
    if sys.argv[1:] == ["--write"]:
        FILE.write_text("\n".join(lines) + "\n")

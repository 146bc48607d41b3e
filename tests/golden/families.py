"""Hashes of what the operators of another kernel family give, without its device: ``triton.txt`` interpreted, ``npu.txt`` by the CPU twins of its
operators' order. To make one again:

    TRITON_INTERPRET=1 python -m tests.golden.families triton
    TRITON_INTERPRET=1 python -m tests.golden.families npu

Each operator of the family gets the operands of its first call with bf16 tensors in ``tests/golden/kernels.py`` (or, where it has none, of its first
call). Left out: packed weights, whose inside is each family's own, and for ``npu`` calls of sizes that its operators refuse. Neither file
says anything about a device: they hold what the definition of a family gives, so that no change of it goes unseen.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.golden import kernels as golden
from tio_megatron import kernels

FOLDER = Path(__file__).parent
LEFT_OUT = {"triton": (), "npu": ("add_rms_norm", "attention_paged", "rms_norm")}


class _Calls(TorchDispatchMode):
    """The operands of one call of each operator, as they were before."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}
        self._bf16: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tio":
            name = func._schema.name.removeprefix("tio::")
            bf16 = any(isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in tree_flatten(args)[0])
            if name not in self.found or bf16 and name not in self._bf16:
                self.found[name] = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)
            if bf16:
                self._bf16.add(name)
        return func(*args, **(kwargs or {}))


def functions(file: str) -> dict[str, Callable[..., Any]]:
    """Operator -> kernel, of the family in ``kernels/<op>/<file>.py``."""
    found: dict[str, Callable[..., Any]] = {}
    for room in sorted(module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg):
        if importlib.util.find_spec(f"tio_megatron.kernels.{room}.{file}") is not None:
            found |= importlib.import_module(f"tio_megatron.kernels.{room}.{file}").KERNELS
    return dict(sorted(found.items()))


def hashes(file: str) -> dict[str, str]:
    """Operator -> 16 hex digits over what it returns and over its operands afterwards."""
    from tests.triton_kernels import interpreter

    interpreter.install()
    if file == "npu":
        from tio_megatron.kernels.npu import stand_in

        stand_in.install()
    golden.registered()
    with _Calls() as calls:
        for _ in golden.results():
            pass
    found = {}
    for name, function in functions(file).items():
        if name.endswith("packed") or name in LEFT_OUT[file]:
            continue
        args = calls.found[name]
        returned = function(*args)
        tensors = [x for x in tree_flatten((returned, args))[0] if isinstance(x, torch.Tensor)]
        found[name] = golden._hash(tensors)
    return found


def read(file: str) -> dict[str, str]:
    """The hashes in ``<file>.txt``."""
    lines = (FOLDER / f"{file}.txt").read_text().splitlines()
    return {name: value for value, name in (line.split("  ", 1) for line in lines if not line.startswith("#"))}


def main(file: str) -> None:
    """Write ``<file>.txt``."""
    head = f"# What the operators of the {file} family give without its device. Made by: TRITON_INTERPRET=1 python -m tests.golden.families {file}\n"
    (FOLDER / f"{file}.txt").write_text(head + "".join(f"{value}  {name}\n" for name, value in hashes(file).items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("family", choices=sorted(LEFT_OUT))
    main(parser.parse_args().family)

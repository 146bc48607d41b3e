"""The operators of flash-attention-npu that we call, against its own sources: ``FLASH_ATTENTION_NPU=DIR`` names an unpacked copy. Read, never imported."""

from __future__ import annotations

import ast
import os
import re
import typing
from pathlib import Path

import pytest
import torch

from tio_megatron.integrations.ascend.start import PACKAGES
from tio_megatron.kernels.npu.calls import FLASH
from tio_megatron.kernels.npu.schemas import FLASH_SCHEMAS

VARIABLE = "FLASH_ATTENTION_NPU"


def schemas(source: str) -> dict[str, str]:
    """``namespace::name`` -> the schema that torch makes of each function that ``source`` registers as an operator.

    >>> schemas("@torch.library.custom_op('a::b', mutates_args=('y',))\\ndef f(x: torch.Tensor, y: Optional[torch.Tensor] = None) -> torch.Tensor: ...")
    {'a::b': '(Tensor x, Tensor(!)? y=None) -> Tensor'}
    """
    found = {}
    for node in ast.parse(source).body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            named = {word.arg: word.value for word in mark.keywords} if isinstance(mark, ast.Call) else {}
            if isinstance(node, ast.FunctionDef) and isinstance(mark, ast.Call) and "mutates_args" in named:
                node.decorator_list, node.body = [], ast.parse("pass").body  # the signature alone
                names: dict[str, typing.Any] = {"torch": torch, **vars(typing)}
                exec(compile(ast.Module([node], []), "signature", "exec", dont_inherit=True), names)
                made = torch.library.infer_schema(names[node.name], mutates_args=ast.literal_eval(named["mutates_args"]))
                found[ast.literal_eval(mark.args[0])] = _plain(made)
    return found


def _plain(schema: str) -> str:
    """Without the letters of what is written to."""
    return re.sub(r"\(a?\w*!\)", "(!)", schema)


def test_our_table_is_what_its_sources_declare() -> None:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set: the sources of flash-attention-npu, unpacked")
    package = Path(os.environ[VARIABLE], PACKAGES["flash-attention-npu"] or "")
    assert package.is_dir(), f"{VARIABLE}: no {package.name} in it; the revision named in docs/ascend.md has it"
    declared: dict[str, str] = {}
    for file in sorted(package.glob("*.py")):
        declared |= schemas(file.read_text())
    assert {name for name in declared if name.startswith(f"{FLASH}::")} >= {schema.split("(")[0] for schema in FLASH_SCHEMAS}
    for schema in FLASH_SCHEMAS:
        name = schema.split("(")[0]
        assert declared[name] == _plain(schema.removeprefix(name)), name


def test_another_schema_is_seen() -> None:
    source = "@wrap('a::b', mutates_args=())\ndef f(x: torch.Tensor, n: int = {}) -> torch.Tensor: ..."
    assert schemas(source.format(1)) != schemas(source.format(2))

"""Lengths of chains and blocks are stated once, in ``contract/families.py``; the C++ kernels are held against it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tio_megatron.contract.families import FAMILIES

CSRC = Path(__file__).resolve().parents[2] / "tio_megatron" / "kernels" / "csrc"
STATED = {
    "chain": ("order.h", "kChain"),
    "row_chain": ("order.h", "kRowChain"),
    "router_chain": ("order.h", "kRouterChain"),
    "kv_block": ("attention.h", "kKeys"),
}


def in_cpp(text: str, name: str) -> int:
    """The value of ``constexpr int name`` in C++ source."""
    (value,) = re.findall(rf"constexpr int {name} = (\d+);", text)
    return int(value)


@pytest.mark.parametrize("field", FAMILIES["cpu"].fields)
def test_the_kernels_have_the_familys_lengths(field):
    file, name = STATED[field]
    assert in_cpp((CSRC / file).read_text(), name) == FAMILIES["cpu"].fields[field]


def test_another_length_is_seen():
    """Negative control."""
    text = (CSRC / "order.h").read_text().replace("kChain = 256", "kChain = 128")
    assert in_cpp(text, "kChain") != FAMILIES["cpu"].fields["chain"]

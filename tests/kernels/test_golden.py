"""No byte of any operator changes unseen: the version in the fingerprint must be raised with it."""

from __future__ import annotations

import torch

from tests.golden import kernels as golden
from tio_megatron import kernels


def test_every_operator_gives_the_bytes_of_its_version(isa: str) -> None:
    version, known = golden.read()
    found = golden.hashes()
    assert not golden.changed(found) or version != kernels.version(), golden.ADVICE.format(names=", ".join(golden.changed(found)), version=version)
    assert (version, known) == (kernels.version(), found), f"tests/golden/kernels.txt is of {version}, or has not every case; run: {golden.COMMAND}"


def test_another_byte_is_seen() -> None:
    version, known = golden.read()
    name = next(iter(known))
    assert golden.changed({**known, name: "0" * 16}) == [name]
    one = golden.Source(1).floats(40)
    other = one.clone()
    other.view(torch.int32)[39] ^= 1
    assert golden._hash([one]) != golden._hash([other])


def test_the_inputs_are_these_numbers() -> None:
    s = golden.Source(1)
    assert [value.hex() for value in s.floats(3).tolist()] == ["0x1.45c9fe0000000p+1", "-0x1.a550cc0000000p-4", "0x1.d8319a0000000p+0"]
    assert s.below(1000, 3).tolist() == [778, 689, 904]


def test_no_operator_is_missing() -> None:
    missing = sorted(golden.registered() - golden.calls().keys())
    assert not missing, f"no case in tests/golden/kernels.py calls {', '.join(missing)}: add one, and run: {golden.COMMAND}"

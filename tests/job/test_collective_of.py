"""The collective of torch's that an error comes from, for the line about a rank that is missing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from examples.qwen3_moe.entry import collective_of


def test_the_name_of_the_collective_and_its_caller():
    def reduces() -> None:
        dist.all_reduce(torch.ones(1))  # without a group

    with pytest.raises(ValueError) as caught:
        reduces()
    assert collective_of(caught.value).startswith("torch's all_reduce (in reduces of test_collective_of.py:")


def test_an_error_from_elsewhere_has_no_name():
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("Connection closed by peer")
    assert collective_of(caught.value).startswith("a collective of torch's (in test_an_error_from_elsewhere_has_no_name of test_collective_of.py:")

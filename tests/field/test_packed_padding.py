"""The auxiliary loss counts tokens: packed samples that are seen to hold padding are refused without a mask, and with one padding counts for nothing.

Padding between samples is seen where ``cu_seqlens_q_padded`` is given and differs from ``cu_seqlens_q``, and behind the last sample always.
"""

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch

from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.layers.grains import MicroBatch
from tio_megatron.testing import RankError, run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

HELD = tempfile.TemporaryDirectory(prefix="tio-packed-padding-")
REFUSED = r"these packed samples hold padding: pass padding_mask \[b, s\]"


@pytest.fixture(scope="module", autouse=True)
def model():
    """Written before ranks start: they must not each write it."""
    write_tiny(Path(HELD.name) / "model", MOE, num_hidden_layers=1, num_experts=8, torch_dtype="float32")


class Padded(Training):
    """The last token of each packed sample is padding. ``told``: how the starts say so (between, behind, not at all); ``mask``: whether a mask does."""

    told, mask = "not at all", True

    def _micro_batch(self, samples, index):
        part = super()._micro_batch(samples, index)
        packing = part["packing"]
        starts = packing.cu_seqlens_q
        last = starts[1:].long() - 1
        if self.told == "between":
            packing.cu_seqlens_q = starts - torch.arange(len(starts), dtype=starts.dtype)
            packing.cu_seqlens_kv, packing.cu_seqlens_q_padded, packing.cu_seqlens_kv_padded = packing.cu_seqlens_q, starts, starts
        if self.told == "behind":
            packing.cu_seqlens_q = packing.cu_seqlens_kv = torch.cat((starts[:-1], starts[-1:] - 1))
            last = last[-1:]
        part["counts"][0, last] = 0.0
        part["padding"] = (part["counts"] == 0) if self.mask else None
        return part


@contextlib.contextmanager
def blind():
    """A planted error: the starts are not compared."""
    sighted, MicroBatch.has_padding = MicroBatch.has_padding, lambda self, length: False
    try:
        yield
    finally:
        MicroBatch.has_padding = sighted


def train(rank, told, mask, plant=contextlib.nullcontext):
    run = Padded(Recipe(Path(HELD.name) / "model", steps=1, samples=4, aux_loss=0.02), parse("tp1", packed=True, micro_batch=2), Contract(grain=8))
    run.told, run.mask = told, mask
    with plant():
        run.step()
    digest = run.sha256()
    run.close()
    return digest


def digest(*what):
    return run_ranks(1, train, *what, timeout=300)[0]


def test_padding_that_is_seen_is_refused_without_a_mask():
    for told in ("between", "behind"):
        with pytest.raises(RankError, match=REFUSED):
            digest(told, False)


def test_with_a_mask_it_makes_no_difference_who_tells_of_padding():
    right = digest("between", True)
    assert digest("not at all", True) == right
    # What the refusal prevents: padding that counts.
    assert digest("between", False, blind) != right

"""Attention and rotation of a sequence: alone, in a batch, in a pack and before padding it has the same bytes."""

from dataclasses import replace

import pytest
import torch

from tio_megatron.kernels.rope import rope_table
from tio_megatron.layers.attention import attention
from tio_megatron.layers.context import global_rows
from tio_megatron.layers.rope import rope
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing import assert_same_bytes, first_mismatch

LENGTHS = (70, 1, 130)
HEADS, GROUPS, D = 4, 2, 16


def sequences(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(n, heads, D, generator=generator).to(dtype) for heads in (HEADS, GROUPS, GROUPS)] for n in LENGTHS]


def alone(q, k, v):
    return attention(q[:, None], k[:, None], v[:, None], scale=0.25)[:, 0]


def starts(lengths=LENGTHS):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_attention_of_a_pack_is_that_of_each_sequence(dtype):
    parts = sequences(dtype)
    packed = [torch.cat([part[i] for part in parts]) for i in range(3)]
    out = attention(*packed, scale=0.25, cu_seqlens=starts())
    assert_same_bytes([alone(*part) for part in parts], list(out.split(LENGTHS)))
    shifted = attention(*packed, scale=0.25, cu_seqlens=starts((69, 2, 130)))
    assert first_mismatch(out, shifted) is not None


def test_attention_behind_the_last_sequence_is_its_own():
    parts = sequences()
    packed = [torch.cat([part[i] for part in parts]) for i in range(3)]
    out = attention(*packed, scale=0.25, cu_seqlens=starts(LENGTHS[:2]))
    assert_same_bytes([alone(*part) for part in parts], list(out.split(LENGTHS)))
    with pytest.raises(ValueError, match="cu_seqlens ends at 201, but there are 200 tokens"):
        attention(*(t[:200] for t in packed), scale=0.25, cu_seqlens=starts())


def test_attention_of_a_batch_and_padding_on_the_right():
    parts = sequences()
    longest = max(LENGTHS)
    batch = [torch.full((longest, len(parts), heads, D), float("nan"), dtype=torch.bfloat16) for heads in (HEADS, GROUPS, GROUPS)]
    for b, part in enumerate(parts):
        for t, padded in zip(part, batch, strict=True):
            padded[: len(t), b] = t
    out = attention(*batch, scale=0.25)
    assert_same_bytes([alone(*part) for part in parts], [out[:n, b] for b, n in enumerate(LENGTHS)])


def test_attention_gradients_of_a_pack_are_those_of_each_sequence():
    parts = sequences(torch.float32)
    dy = torch.randn(sum(LENGTHS), HEADS, D, generator=torch.Generator().manual_seed(1))
    packed = [torch.cat([part[i] for part in parts]).requires_grad_() for i in range(3)]
    attention(*packed, scale=0.25, cu_seqlens=starts()).backward(dy)
    for part, d, *whole in zip(parts, dy.split(LENGTHS), *(t.grad.split(LENGTHS) for t in packed), strict=True):
        for t in part:
            t.requires_grad_()
        alone(*part).backward(d)
        assert_same_bytes(whole, [t.grad for t in part])


def test_rope_of_a_pack_is_that_of_each_sequence():
    table = rope_table(130, D, 1e6)
    parts = [part[0] for part in sequences(torch.float32)]
    packed = torch.cat(parts)
    out = rope(packed, table, Sequences(starts()))
    assert_same_bytes([rope(part[:, None], table)[:, 0] for part in parts], list(out.split(LENGTHS)))
    assert_same_bytes(parts[0][0], out[0], "position 0 is not rotated")


def test_a_table_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="a sequence has 130 tokens but the table holds 64 positions"):
        rope(torch.cat([part[0] for part in sequences()]), rope_table(64, D, 1e6), Sequences(starts()))


@pytest.mark.parametrize("sequences", [Sequences(), Sequences(starts((40, 0, 8)))], ids=["batch", "packed"])
def test_rope_of_a_rank_of_context_is_its_part_of_the_whole(sequences):
    table = rope_table(64, D, 1e6)
    whole = torch.randn(48, 1, HEADS, D, generator=torch.Generator().manual_seed(3)).expand(-1, 2, -1, -1).contiguous()
    whole = whole if sequences.starts is None else whole[:, 0]
    expected = rope(whole, table, sequences)
    for rank in range(2):
        cut = replace(sequences, rank=rank, ranks=2)
        own = global_rows(cut, 24).chunk(2)[rank]
        assert_same_bytes(expected[own], rope(whole[own], table, cut))
        assert first_mismatch(expected[own], rope(whole[own], table, replace(cut, rank=1 - rank))) is not None

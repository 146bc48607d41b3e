"""The twin's walk is the one that is written: a second definition, key by key for one query row, has its bytes, and each other order has not."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.contract import FAMILIES
from tio_megatron.kernels import math as our
from tio_megatron.kernels.npu.twin_attention import FAMILY, KV_BLOCK, Order, _walk, attend
from tio_megatron.testing import assert_same_bytes

SIZE, SCALE = 16, 0.5


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block: int = 512, down: bool = False, rounded: bool = True, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q[D]`` over all keys ``k[m, D]``, ``v[m, D]``: blocks ascending from position 0, the sum of a block by the tree, keys ascending.

    The numerator ``[D]`` and the sum, fp32.
    """
    blocks = [range(start, min(start + block, len(k))) for start in range(0, len(k), block)]
    runs = [blocks[: len(blocks) // parts], blocks[len(blocks) // parts :]] if parts == 2 else [blocks]
    done = [walk(q, k, v, run, block, down, rounded) for run in runs if run]
    acc, top, total = done[0]
    for acc2, top2, total2 in done[1:]:
        new = torch.maximum(top, top2)
        a, b = our.exp((top - new).reshape(1))[0], our.exp((top2 - new).reshape(1))[0]
        acc, total, top = acc * a + acc2 * b, total * a + total2 * b, new
    return acc, total


def walk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: list[range], block: int, down: bool, rounded: bool):
    acc, top, total = None, torch.tensor(float("-inf")), torch.tensor(0.0)
    for keys in reversed(blocks) if down else blocks:
        score = torch.zeros(len(keys))
        for d in range(SIZE):
            score = score + q[d].float() * k[keys.start : keys.stop, d].float()
        score = score * SCALE
        new = torch.maximum(top, score.max())
        p = our.exp(score - new)
        level = torch.zeros(block)
        level[: len(keys)] = p
        while len(level) > 1:
            level = level[0::2] + level[1::2]
        pv = torch.zeros(SIZE)
        weights = p.bfloat16().float() if rounded else p
        for at, key in reversed([*enumerate(keys)]) if down else enumerate(keys):
            pv = pv + weights[at] * v[key].float()
        if acc is None:
            acc, total = pv, level[0]
        else:
            a = our.exp((top - new).reshape(1))[0]
            acc, total = acc * a + pv, total * a + level[0]
        top = new
    return acc, top, total


def row(keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(keys)
    return tuple(torch.randn(*shape, generator=g).bfloat16() for shape in ((SIZE,), (keys, SIZE), (keys, SIZE)))  # type: ignore[return-value]


def twin(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The twin's numerator and sum, before the one rounding, which would hide most of what another order does."""
    acc, _, total = _walk(q[None, None], k, v, torch.tensor([len(k) - 1]), SCALE, FAMILY)
    return torch.cat([acc.flatten(), total.flatten()])


def test_the_block_is_the_familys() -> None:
    assert KV_BLOCK == FAMILIES["npu-910b"].fields["kv_block"] == 512
    assert Order() == FAMILY == Order(block=512, grid=0, splits=1, visit_masked=False, narrow=False)


@pytest.mark.parametrize("keys", [1, 5, 512, 513, 1300])
def test_the_twin_has_the_bytes_of_the_written_order(keys: int) -> None:
    q, k, v = row(keys)
    acc, total = by_hand(q, k, v)
    assert_same_bytes(twin(q, k, v), torch.cat([acc, total.reshape(1)]), f"{keys} keys")
    o, _, _ = attend(q[None, None], k[:, None], v[:, None], SCALE)
    assert_same_bytes(o[0, 0], (acc / total).bfloat16(), "one rounding")


@pytest.mark.parametrize("other", [{"block": 256}, {"down": True}, {"rounded": False}, {"parts": 2}], ids=str)
def test_another_order_has_not(other: dict[str, int]) -> None:
    q, k, v = row(1300)
    acc, total = by_hand(q, k, v, **other)  # type: ignore[arg-type]
    assert (twin(q, k, v) != torch.cat([acc, total.reshape(1)])).any()

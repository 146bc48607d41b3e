"""Moves between real processes: any dtype, uneven rows, ranks with none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tio_megatron import collectives
from tio_megatron.testing import assert_same_bytes, poison, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64)


def rows(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count * 3).reshape(count, 3) + 100 * rank).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_gather(size):
    def rank_main(rank):
        with poison():
            for dtype in DTYPES:
                for sizes in (None, [2] * size, [(3 * r) % 4 for r in range(size)], [0] * size, [0] * (size - 1) + [5]):
                    counts = [2] * size if sizes is None else sizes
                    y = collectives.all_gather(rows(rank, counts[rank], dtype), dist.group.WORLD, sizes=sizes)
                    assert_same_bytes(y, torch.cat([rows(r, counts[r], dtype) for r in range(size)]), f"{dtype} {sizes}")
            x = rows(rank, 4, torch.float32).t()
            assert_same_bytes(collectives.all_gather(x, dist.group.WORLD), torch.cat([rows(r, 4, torch.float32).t() for r in range(size)]), "transposed")
            one = torch.tensor([rank])
            assert collectives.all_gather(one, dist.group.WORLD).tolist() == list(range(size))

    run_ranks(size, rank_main)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_to_all(size):
    """The expert dispatch: rank a sends table[a][b] rows to rank b; some ranks and pairs have none."""
    tables = [
        [[(a * 2 + b) % 3 for b in range(size)] for a in range(size)],
        [[0] * size for _ in range(size)],
        [[0 if a == size - 1 else 2 for _ in range(size)] for a in range(size)],
        [[4 if b == 0 else 0 for b in range(size)] for _ in range(size)],
    ]

    def rank_main(rank):
        with poison():
            for dtype in DTYPES:
                for table in tables:
                    to, source = table[rank], [table[a][rank] for a in range(size)]
                    parts = [rows(rank * 10 + b, to[b], dtype) for b in range(size)]
                    want = torch.cat([rows(a * 10 + rank, source[a], dtype) for a in range(size)])
                    for form in (list, tuple, torch.tensor):
                        assert_same_bytes(collectives.all_to_all(torch.cat(parts), form(source), form(to), dist.group.WORLD), want, f"{dtype} {table}")
            even = torch.arange(size * 2) + 100 * rank
            y = collectives.all_to_all(even, None, None, dist.group.WORLD)
            assert y.tolist() == [100 * a + 2 * rank + i for a in range(size) for i in range(2)]

    run_ranks(size, rank_main)


def test_all_max():
    nan, inf = float("nan"), float("inf")
    table = [[1.0, -0.0, 0.0, nan, -inf, 5.0], [2.0, 0.0, -0.0, 1.0, -inf, nan], [-3.0, -0.0, -0.0, 2.0, -inf, inf]]

    def rank_main(rank):
        return collectives.all_max(torch.tensor(table[rank]), dist.group.WORLD)

    for y in run_ranks(3, rank_main):
        assert_same_bytes(y, torch.tensor([2.0, 0.0, 0.0, nan, -inf, nan]))
    assert_same_bytes(collectives.all_max(torch.tensor([-0.0, 1.0]), None), torch.tensor([0.0, 1.0]))

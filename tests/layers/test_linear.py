"""Column- and row-parallel products: any cut gives the bytes of one rank, forward and input gradient; gradients reach the sink in fp32."""

import contextlib
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist

from tio_megatron.layers import grads
from tio_megatron.layers.linear import column_parallel, row_parallel
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

S, B, K, N, LEAVES = 8, 2, 64, 96, 8


def values(dtype, gated=False):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return draw(S, B, K), draw(N, K), draw(S, B, N)


def shard(t, dim, ranks, rank):
    return t.chunk(ranks, dim)[rank].contiguous()


def gate_up_shard(w, ranks, rank):
    gate, up = w.chunk(2)
    return torch.cat([shard(gate, 0, ranks, rank), shard(up, 0, ranks, rank)])


def cut_columns(t, dim, ranks, rank, gated):
    return gate_up_shard(t.transpose(0, dim), ranks, rank).transpose(0, dim).contiguous() if gated else shard(t, dim, ranks, rank)


def column(rank, ranks, dtype, sp, gated):
    x, w, dy = values(dtype)
    cut = partial(cut_columns, ranks=ranks, rank=rank, gated=gated)
    x = (shard(x, 0, ranks, rank) if sp else x).requires_grad_()
    w = cut(w, 0).requires_grad_()
    y = column_parallel(x, w, group=dist.group.WORLD, sequence_parallel=sp, dgrad_leaves=LEAVES // ranks, gated=gated)
    y.backward(cut(dy, 2))
    return y.detach(), x.grad, w.grad


def row(rank, ranks, dtype, sp, _):
    x, w, dy = values(dtype)
    w, dy = w.t().contiguous(), dy
    x, dy = dy, x
    x = shard(x, 2, ranks, rank).requires_grad_()
    w = shard(w, 1, ranks, rank).requires_grad_()
    y = row_parallel(x, w, leaves=LEAVES // ranks, group=dist.group.WORLD, sequence_parallel=sp)
    y.backward(shard(dy, 0, ranks, rank) if sp else dy)
    return y.detach(), x.grad, w.grad


WORK = {
    f"{name} {str(dtype).removeprefix('torch.')}": (work, dtype, gated)
    for name, work, gated in (("column", column, False), ("gated column", column, True), ("row", row, False))
    for dtype in (torch.bfloat16, torch.float32)
}


@cache
def results(ranks):
    """By rank: (work, sequence parallel) -> output, input gradient, weight gradient; one start for all."""

    def everything(rank):
        return {(name, sp): work(rank, ranks, dtype, sp, gated) for name, (work, dtype, gated) in WORK.items() for sp in (False, True)}

    return run_ranks(ranks, everything)


@pytest.mark.parametrize("ranks, sp", [(2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("name", [name for name in WORK if "column" in name])
def test_column(name, ranks, sp):
    y, dx, dw = results(1)[0][name, False]
    for rank, parts in enumerate(results(ranks)):
        y_part, dx_part, dw_part = parts[name, sp]
        cut = partial(cut_columns, ranks=ranks, rank=rank, gated="gated" in name)
        assert_same_bytes(cut(y, 2), y_part, "output")
        assert_same_bytes(shard(dx, 0, ranks, rank) if sp else dx, dx_part, "input gradient")
        assert_same_bytes(cut(dw, 0), dw_part, "weight gradient")


@pytest.mark.parametrize("ranks, sp", [(2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("name", [name for name in WORK if "row" in name])
def test_row(name, ranks, sp):
    y, dx, dw = results(1)[0][name, False]
    for rank, parts in enumerate(results(ranks)):
        y_part, dx_part, dw_part = parts[name, sp]
        assert_same_bytes(shard(y, 0, ranks, rank) if sp else y, y_part, "output")
        assert_same_bytes(shard(dx, 2, ranks, rank), dx_part, "input gradient")
        assert_same_bytes(shard(dw, 1, ranks, rank), dw_part, "weight gradient")


def test_the_leaves_decide():
    """Negative control: another number of leaves is another sum."""
    x, w, _ = values(torch.float32)
    assert first_mismatch(row_parallel(x, w, leaves=8), row_parallel(x, w, leaves=1)) is not None


class Sink:
    """Keeps what it is given."""

    def __init__(self):
        self.seen = []

    def products(self, weights, dy, x, grains):
        self.seen.append((weights, dy, x, grains))
        return [None] * len(weights)


@contextlib.contextmanager
def sink():
    ours = Sink()
    before = grads.use(ours)
    try:
        yield ours
    finally:
        grads.use(before)


def test_a_sink_gets_the_operands():
    x, w, dy = values(torch.bfloat16)
    w.requires_grad_()
    with sink() as ours:
        column_parallel(x, w).backward(dy)
    weights, left, right, grains = ours.seen[0]
    assert weights[0] is w and w.grad is None
    assert_same_bytes([left, right], [dy.flatten(0, -2), x.flatten(0, -2)])
    assert grains.starts.tolist() == [0, len(left)]


def test_a_frozen_weight_asks_for_no_gradient():
    x, w, dy = values(torch.float32)
    x.requires_grad_()
    with sink() as ours:
        column_parallel(x, w).backward(dy)
        row_parallel(dy.requires_grad_(), w.t().contiguous(), leaves=8).backward(x.detach())
    assert x.grad is not None and not ours.seen


def test_operands_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"weight \(2, 3\): operands \(4, 2\) and \(4, 2\) do not fit"):
        grads.products([torch.zeros(2, 3)], torch.zeros(4, 2), torch.zeros(4, 2), grads.first_rows(4))

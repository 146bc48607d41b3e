"""The table of layouts sees a wrong order: one part at a time is planted in both layouts, and they differ. Needs DeepSpeed: make test-deepspeed."""

import pytest

pytest.importorskip("deepspeed", reason="NOT RUN: deepspeed is not installed here: make test-deepspeed")

import torch
import torch.distributed as dist
from deepspeed_runs import Layout, joined, train_all

from tio_megatron.integrations.deepspeed import experts, linears, moe, sums
from tio_megatron.layers.grains import size
from tio_megatron.testing import run_ranks


def plain_row(x, weight, *, group=None, **_):
    """A product of this rank's inputs, and a vendor's sum over ranks."""
    out = x @ weight.t()
    if group is not None and group.size() > 1:
        out = out.contiguous()
        dist.all_reduce(out, group=group)
    return out


class PlainColumn(torch.autograd.Function):
    """The input gradient as one product on each rank, added by a vendor's sum."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        if ctx.group is not None and ctx.group.size() > 1:
            dist.all_reduce(dx, group=ctx.group)
        return dx, dy.flatten(0, -2).t() @ x.flatten(0, -2), None


def plain_column(x, weight, *, group=None, **_):
    return PlainColumn.apply(x, weight, group)


def all_at_once(modules, rows, counts):
    """An expert sees everybody's rows in one call."""
    return experts.run_experts(modules, rows, counts.sum(1, keepdim=True))


def float_sums(parts, group):
    """As a reduction of fp32 numbers would: each rank's sum rounded first."""
    for part in parts:
        rounded = part.float()
        if group is not None and group.size() > 1:
            dist.all_reduce(rounded, group=group)
        part.copy_(rounded.long())


def place_of_every_share(group):
    """As if a share of a micro-batch's tokens were a micro-batch."""
    from deepspeed.utils import groups

    return 1 if group is groups._TENSOR_MODEL_PARALLEL_GROUP else size(group)


PLANTS = {
    "row": ((linears, "row_parallel", plain_row), Layout(world=2, tp=2)),
    "column": ((linears, "column_parallel", plain_column), Layout(world=2, tp=2)),
    "experts": ((moe, "run_experts", all_at_once), Layout(world=2, ep=2)),
    "shares": ((moe, "size", place_of_every_share), Layout(world=2, tp=2, ep=2)),
    "sums": ((sums, "add_over", float_sums), Layout(world=2)),
}


def planted(rank, name, layout):
    (module, attribute, wrong), _ = PLANTS[name]
    setattr(module, attribute, wrong)
    return train_all(rank, [layout])[0]


@pytest.mark.parametrize("name", PLANTS)
def test_a_wrong_order_is_seen(name):
    layout = PLANTS[name][1]._replace(steps=2)
    alone = joined(run_ranks(1, planted, name, layout._replace(world=1, tp=1, ep=min(layout.ep, 1)), timeout=200))
    found = joined(run_ranks(layout.world, planted, name, layout, timeout=200))
    assert any(value.numpy().tobytes() != found[at].numpy().tobytes() for at, value in alone.items())

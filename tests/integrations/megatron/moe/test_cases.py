"""What goes wrong in the field (docs: the case numbers), on one expert layer."""

import dataclasses

import moe_world as world
import pytest
import torch

from tio_megatron.testing import assert_same_bytes, first_mismatch, poison

BOTH = ("alltoall", "allgather")


def forward(row, x, padding=None, change=None):
    """The whole output, from this row's ranks; ``change(layer)`` may edit the layer first."""

    def work(rank):
        layer = world.build(row)
        if change is not None:
            change(layer)
        with poison():
            return world.step(layer, row, x, padding_mask=padding)

    return world.gather(world.run(row, work), "out")


@pytest.mark.parametrize("way, plant", [("alltoall", "own_experts_first"), ("allgather", "ring_from_owner")])
def test_case_3_and_4_the_owner_of_a_token_does_not_matter(way, plant):
    """The same samples on other ranks: every token's bytes move with it. A sum that begins at the owner, in the dispatcher's way, fails this."""
    row = world.Row(ep=4, way=way, k=4)
    x = world.problem(row).x

    def work(rank):
        layer = world.build(row)
        with poison():
            (place, here), (_, there) = (world.step(layer, row, samples) for samples in (x, x.roll(1, 1)))
        with world.PLANTS[plant]():
            (_, wrong), (_, elsewhere) = (world.step(layer, row, samples) for samples in (x, x.roll(1, 1)))
        return place, {"here": here["out"], "there": there["out"], "wrong": wrong["out"], "elsewhere": elsewhere["out"]}

    results = world.run(row, work)
    found = {name: world.gather(results, name) for name in ("here", "there", "wrong", "elsewhere")}
    assert_same_bytes(found["there"], found["here"].roll(1, 1), "samples on another rank")
    assert first_mismatch(found["elsewhere"], found["wrong"].roll(1, 1)) is not None


def test_case_7_ties_go_to_the_lower_id_on_every_layout():
    """Experts 2, 5 and 11 have one router row, made the best of all: rank k = 2 cuts through a tie."""
    alike = [2, 5, 11]

    def tie(layer):
        with torch.no_grad():
            layer.router.weight[alike] = layer.router.weight[2].abs() * 2

    for way in BOTH:
        row = world.Row(ep=4, way=way, k=2)
        x = world.problem(row).x.abs()

        def ids(rank, row=row, x=x):
            layer = world.build(row)
            tie(layer)
            return layer.router(world.own(row, x))[1].unique(dim=0).tolist()

        assert all(found == [[2, 5]] for found in world.run(row, ids))
        assert_same_bytes(forward(row, x, change=tie), forward(row.alone, x, change=tie), way)


def test_case_7_no_tie_comes_from_bf16():
    """bf16 weights and hidden states, 128 experts: our router's logits are fp32 and never equal at rank k, so the choice is that of exact logits.

    The control: with the defaults, stock's logits are bf16, and tie there in some percent of the rows.
    """
    row = world.Row(k=8, dtype="bf16", experts=128)
    p = world.problem(row)

    def work(rank):
        ours, stock = (world.build(row, stock=other, moe_router_dtype=None).router for other in (False, True))
        return ours.gating(p.x), ours(p.x)[1], stock.gating(p.x).flatten(0, -2)

    logits, ids, rounded = world.run(row, work)[0]

    def ties(values):
        return (values.sort(1, descending=True).values[:, 7:9].float().diff() == 0).float().mean().item()

    assert (logits.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert ties(logits) == 0.0 and ties(rounded) > 0.01
    exact = p.x.flatten(0, 1).double() @ p.router.double().T
    assert_same_bytes(ids, exact.topk(8).indices.sort(1).values, "chosen experts")
    assert first_mismatch(rounded.topk(8).indices.sort(1).values, ids) is not None


def test_case_8_one_rule_for_probabilities():
    """The chosen probabilities of the softmax over all experts, with and without making them sum to one."""
    row = world.Row(k=4)
    p = world.problem(row)

    def work(rank):
        return [world.build(row, moe_router_pre_softmax=pre).router(p.x) for pre in (False, True)]

    (normal, ids), (plain, same) = world.run(row, work)[0]
    assert_same_bytes(ids, same, "ids")
    assert (ids.diff(dim=1) > 0).all()
    exact = torch.softmax(p.x.flatten(0, 1).double() @ p.router.double().T, 1).gather(1, ids)
    assert (plain - exact).abs().max() < 1e-5
    assert (normal - exact / exact.sum(1, keepdim=True)).abs().max() < 1e-5


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (4, 2, 2)], ids=str)
def test_case_9_padding_is_never_routed_and_moves_nothing(way, layout):
    """Padding tokens may hold anything, NaN included: real tokens keep their bytes, padding gets +0."""
    row = world.Row(*layout, way=way, k=4)
    x = world.problem(row).x
    padding = torch.zeros(world.S, world.B, dtype=torch.bool)
    padding[150:, 1] = padding[3:, 2] = True
    dirty = x.clone()
    dirty[padding] = float("nan")
    out = forward(row, dirty, padding)
    assert_same_bytes(out[~padding], world.alone(row)["out"][~padding], "real tokens")
    assert_same_bytes(out[padding], torch.zeros_like(out[padding]), "padding")


@pytest.mark.parametrize("way", BOTH)
def test_case_9_more_padding_at_the_end_moves_nothing(way):
    row = world.Row(tp=2, ep=2, etp=1, way=way, k=8)
    x = world.problem(row).x
    longer = torch.cat((x, torch.randn(24, *x.shape[1:])))
    padding = torch.zeros(longer.shape[:2], dtype=torch.bool)
    padding[world.S :] = True
    assert_same_bytes(forward(row, longer, padding)[: world.S], world.alone(row)["out"], "longer")


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("layout", [(1, 4, 1), (4, 2, 2), (2, 1, 2)], ids=str)
def test_case_11_ranks_without_rows_or_tokens(way, layout):
    """Every token goes to experts 0 and 1, so most ranks get no row; then one data-parallel rank has padding alone. Forward and backward."""
    row = world.Row(*layout, way=way, k=2)
    p = world.problem(row)
    x = p.x.abs()
    padding = torch.zeros(world.S, world.B, dtype=torch.bool)
    padding[:, world.B - 1] = True

    def work(rank, row=row):
        layer = world.build(row)
        with torch.no_grad():
            layer.router.weight[2:] = -layer.router.weight[2:].abs()
            layer.router.weight[:2] = layer.router.weight[:2].abs() * 3
        with poison():
            place, found = world.step(layer, row, x, p.dout, padding_mask=padding)
            grads = [w.grad for pair in world.expert_weights(layer) for w in pair]
        assert all(torch.isfinite(g).all() for g in grads)
        return place, found

    here, alone = world.run(row, work), world.run(row.alone, work, row.alone)
    for name in ("out", "dx"):
        assert_same_bytes(world.gather(here, name), world.gather(alone, name), name)
        assert torch.isfinite(world.gather(here, name)).all()


@pytest.mark.parametrize("way", BOTH)
def test_case_12_nan_stays_in_its_token(way):
    """Buffers are poisoned in ``forward``; a NaN in one token reaches no other."""
    row = world.Row(tp=2, ep=2, etp=2, way=way, k=4)
    x = world.problem(row).x.clone()
    x[17, 3] = float("nan")
    out = forward(row, x)
    clean = world.alone(row)["out"]
    other = torch.ones(out.shape[:2], dtype=torch.bool)
    other[17, 3] = False
    assert out[17, 3].isnan().all()
    assert_same_bytes(out[other], clean[other], "other tokens")


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("experts, ep", [(12, 2), (12, 4), (6, 2)])
def test_experts_per_rank_need_not_be_a_power_of_two(way, experts, ep):
    row = world.Row(ep=ep, way=way, k=4, experts=experts)
    p = world.problem(row)
    results = world.run(row, lambda rank: world.step(world.build(row), row, p.x, p.dout))
    for name in ("out", "dx"):
        assert_same_bytes(world.gather(results, name), world.alone(row)[name], name)


def test_minus_zero_survives():
    """A token whose expert rows are all -0 gets -0, whatever travels: absent terms are skipped, not added."""
    for way in BOTH:
        row = world.Row(ep=4, way=way, k=4)

        def negative(layer):
            with torch.no_grad():
                for w13, w2 in world.expert_weights(layer):
                    w13.fill_(0.0)
                    w2.fill_(-1.0)

        x = world.problem(row).x
        out = forward(row, x, change=negative)
        assert_same_bytes(out, forward(row.alone, x, change=negative), way)


def test_shared_experts_in_every_layout():
    """A shared expert of width 64 beside the routed ones: the same bytes over tensor-parallel ranks."""

    def work(rank, row):
        layer = world.build(row, moe_shared_expert_intermediate_size=64)
        g, tp = torch.Generator().manual_seed(5), row.tp
        fc1, fc2 = torch.randn(2, 64, world.H, generator=g) * 0.1, torch.randn(world.H, 64, generator=g) * 0.1
        at = rank % tp
        with torch.no_grad():
            layer.shared_experts.linear_fc1.weight.copy_(fc1.chunk(tp, 1)[at].flatten(0, 1))
            layer.shared_experts.linear_fc2.weight.copy_(fc2.chunk(tp, 1)[at])
        p = world.problem(row)
        return world.step(layer, row, p.x, p.dout)

    alone = world.Row().alone
    expected = world.run(alone, work, alone)[0][1]
    assert first_mismatch(expected["out"], world.alone(alone)["out"]) is not None, "the shared expert does nothing"
    for row in (world.Row(tp=2, ep=2), world.Row(tp=4, ep=2, etp=2, way="allgather")):
        found = world.run(row, work, row)
        for name in ("out", "dx"):
            assert_same_bytes(world.gather(found, name), expected[name], f"{row}: {name}")


@pytest.mark.parametrize("fields", [dict(tp=2, etp=2), dict(tp=4, etp=4), dict(ep=4, way="allgather", k=8)], ids=["etp2", "etp4", "ep4-allgather"])
def test_control_stock_differs(fields):
    """Megatron's own layer gives other bytes in these layouts, in fp32."""
    row = world.Row(grouped=False, **fields)
    x = world.problem(row).x

    def work(rank, row):
        return world.step(world.build(row, stock=True), row, x)

    here = world.gather(world.run(row, work, row), "out")
    alone = dataclasses.replace(row.alone, grouped=False)
    assert first_mismatch(here, world.gather(world.run(alone, work, alone), "out")) is not None

"""Both ways of moving tokens to experts, between real processes, with any number of tokens on each rank."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tio_megatron.collectives import all_gather
from tio_megatron.layers.dispatch import AllGather, AllToAll, ExpertGroups
from tio_megatron.layers.experts import ExpertMLP
from tio_megatron.layers.permute import NOT_ROUTED, chunk_order, inverse_order, plan_rows
from tio_megatron.layers.router import route_tokens
from tio_megatron.testing import assert_same_bytes, first_mismatch, poison, run_ranks

H, WIDTH, E, K = 32, 16, 6, 3
WAYS = {"alltoall": AllToAll, "allgather": AllGather}


def problem(tokens):
    g = torch.Generator().manual_seed(0)
    x, dout = torch.randn(tokens, H, generator=g), torch.randn(tokens, H, generator=g)
    w13, w2 = torch.randn(E, 2 * WIDTH, H, generator=g) * 0.2, torch.randn(E, H, WIDTH, generator=g) * 0.3
    ids, probs = route_tokens(torch.randn(tokens, E, generator=g), K, normalise=True)
    return x, dout, w13, w2, ids, probs


def groups(ep, etp):
    """Ranks in the order of Megatron: expert-tensor-parallel fastest."""
    rank, eps, etps = dist.get_rank(), None, None
    for i in range(etp):
        made = dist.new_group(list(range(i, ep * etp, etp)))
        eps = made if rank % etp == i else eps
    for i in range(ep):
        made = dist.new_group(list(range(i * etp, (i + 1) * etp)))
        etps = made if rank // etp == i else etps
    return ExpertGroups(E, eps, etps, dist.group.WORLD)


def layer(rank, way, sizes, ep, etp):
    """Outputs and gradients of hidden states and probabilities, whole, by own tokens ``sizes[rank]``."""
    x, dout, w13, w2, ids, probs = problem(sum(sizes))
    g = groups(ep, etp)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    x, probs, cut = x[mine].requires_grad_(), probs[mine].requires_grad_(), WIDTH // etp
    at = slice((rank % etp) * cut, (rank % etp + 1) * cut)
    first = [w.unflatten(0, (2, WIDTH))[:, at].flatten(0, 1).contiguous() for w in w13[g.lo : g.hi]]
    second = [w[:, at].contiguous() for w in w2[g.lo : g.hi]]
    with poison():
        move = WAYS[way](ids[mine], g)
        rows = move.dispatch(move.spread(x) if way == "alltoall" else x)
        rows = ExpertMLP.apply(rows, move.offsets, 8 // etp, 8 // etp, g.etp, None, *first, *second)
        out = move.combine(move.collect(rows) if way == "alltoall" else rows, probs)
        out.backward(dout[mine])
    return [all_gather(t.detach(), dist.group.WORLD, sizes=sizes) for t in (out, x.grad, probs.grad)]


SIZES = [
    (2, 1, (7, 5)),
    (2, 1, (12, 0)),
    (3, 1, (0, 1, 11)),
    (1, 2, (0, 12)),
    (2, 2, (5, 0, 0, 7)),
    (3, 1, (0, 0, 0)),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ep, etp, sizes", SIZES, ids=str)
def test_any_tokens_on_any_rank(ep, etp, sizes, way):
    """Ranks without a token, experts without a row, three ranks, two experts a rank: the bytes of one rank."""
    expected = run_ranks(1, layer, way, (sum(sizes),), 1, 1)[0]
    for rank, found in enumerate(run_ranks(len(sizes), layer, way, sizes, ep, etp)):
        for name, ours, alone in zip(("out", "dx", "dprobs"), found, expected, strict=True):
            assert_same_bytes(ours, alone, f"rank {rank}: {name}")


def test_both_ways_are_one():
    ways = [run_ranks(4, layer, way, (3, 9, 0, 4), 2, 2)[0] for way in WAYS]
    for name, a, b in zip(("out", "dx", "dprobs"), *ways, strict=True):
        assert_same_bytes(a, b, name)
    assert first_mismatch(ways[0][0], ways[0][1]) is not None


def test_plan_of_no_token():
    plan = plan_rows(torch.empty(0, K, dtype=torch.int64), 0, E)
    assert plan.rows == 0 and plan.offsets.tolist() == [0] * (E + 1) and plan.index.shape == (0, K)


def test_a_plan_covers_each_choice_once():
    ids = problem(40)[4]
    ids[3] = NOT_ROUTED
    seen = torch.zeros(40, K, dtype=torch.int64)
    for lo, hi in ((0, 1), (1, 4), (4, 6)):
        plan = plan_rows(ids, lo, hi)
        token, choice = (plan.index >= 0).nonzero(as_tuple=True)
        assert_same_bytes(plan.token[plan.index[token, choice]], token, "token of each row")
        for e in range(lo, hi):
            rows = plan.token[plan.offsets[e - lo] : plan.offsets[e - lo + 1]]
            assert_same_bytes(rows, (ids == e).any(1).nonzero().squeeze(1), f"tokens of expert {e}, ascending")
        seen += plan.index >= 0
    assert_same_bytes(seen, (ids >= 0).long(), "choices")


def test_a_plan_of_every_choice_asks_nothing_and_is_the_same():
    ids = problem(40)[4]
    with mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError("asked")), mock.patch.object(torch.Tensor, "nonzero", None):
        known = plan_rows(ids, 0, E, every=True)
        with pytest.raises(AssertionError, match="asked"):
            plan_rows(ids, 0, E)
    asked = plan_rows(ids, 0, E)
    for part in ("token", "index", "offsets"):
        assert_same_bytes(getattr(known, part), getattr(asked, part), part)


@pytest.mark.parametrize(("lo", "hi"), [(0, 1), (1, 4), (4, 6), (0, E)])
def test_a_padded_plan_asks_nothing_and_names_the_same_rows(lo: int, hi: int):
    ids = problem(40)[4]
    ids[3] = NOT_ROUTED
    with mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError("asked")), mock.patch.object(torch.Tensor, "nonzero", None):
        padded = plan_rows(ids, lo, hi, padded=True)
    asked = plan_rows(ids, lo, hi)
    assert padded.rows == ids.numel() and padded.offsets[0] == 0 and padded.offsets[-1] == ids.numel() and (padded.counts >= 0).all()
    assert_same_bytes(padded.index >= 0, asked.index >= 0, "choices")
    here = asked.index >= 0
    assert_same_bytes(padded.token[padded.index[here]], asked.token[asked.index[here]], "token of each row")
    expert = torch.searchsorted(padded.offsets, padded.index[here], right=True) - 1 + lo
    assert_same_bytes(expert, ids[here], "expert of each row")
    assert (lo, hi) == (0, E) or padded.rows > asked.rows


def test_the_all_to_all_way_asks_once():
    ids = problem(40)[4]
    ids[3] = NOT_ROUTED
    asked, tolist = [], torch.Tensor.tolist
    with mock.patch.object(torch.Tensor, "tolist", lambda t: asked.append(t) or tolist(t)):
        AllToAll(ids, ExpertGroups(E))
    assert len(asked) == 1


def test_chunks_sort_by_expert_and_back():
    counts = torch.tensor([[2, 0, 1], [0, 3, 1]])
    assert_same_bytes(chunk_order(counts, 7), chunk_order(counts), "with the sum known")
    rows = torch.tensor([0, 0, 2, 1, 1, 1, 2])
    order = chunk_order(counts)
    assert rows[order].tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert_same_bytes(rows[order][inverse_order(order)], rows, "inverse")


@pytest.mark.parametrize("ids, lo, hi", [(torch.zeros(3, dtype=torch.int64), 0, 2), (torch.zeros(3, 2), 0, 2), (torch.zeros(3, 2, dtype=torch.int64), 2, 2)])
def test_plans_refused(ids, lo, hi):
    with pytest.raises(ValueError, match="plan_rows"):
        plan_rows(ids, lo, hi)


def test_groups_refused():
    def work(rank):
        with pytest.raises(ValueError, match="5 do not divide by an expert-parallel size of 2"):
            ExpertGroups(5, dist.group.WORLD, None, dist.group.WORLD)
        with pytest.raises(ValueError, match="group of 2 ranks"):
            ExpertGroups(4, None, None, dist.group.WORLD)

    run_ranks(2, work)


def test_padding_is_not_routed_and_gives_no_gradient():
    logits = torch.randn(4, E, requires_grad=True)
    padding = torch.tensor([False, True, False, True])
    ids, probs = route_tokens(logits, K, normalise=True, padding=padding)
    assert (ids[padding] == NOT_ROUTED).all() and (probs[padding] == 0).all() and (ids[~padding] >= 0).all()
    probs.backward(torch.randn(4, K))
    assert (logits.grad[padding] == 0).all() and (logits.grad[~padding] != 0).any()

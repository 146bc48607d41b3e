"""What is elementwise or along a row gives, in Triton, the bytes of the references."""

import pytest
import torch

from tio_megatron.contract import ReductionTree, VocabOrder
from tio_megatron.kernels.combine import reference as combine_reference
from tio_megatron.kernels.combine import triton as combine
from tio_megatron.kernels.embedding import reference as embedding_reference
from tio_megatron.kernels.embedding import triton as embedding
from tio_megatron.kernels.logprob import reference as logprob_reference
from tio_megatron.kernels.logprob import triton as logprob
from tio_megatron.kernels.math import reference as math_reference
from tio_megatron.kernels.math import triton as math
from tio_megatron.kernels.norm import reference as norm_reference
from tio_megatron.kernels.norm import triton as norm
from tio_megatron.kernels.rope import reference as rope_reference
from tio_megatron.kernels.rope import rope_table
from tio_megatron.kernels.rope import triton as rope
from tio_megatron.kernels.router import reference as router_reference
from tio_megatron.kernels.router import triton as router
from tio_megatron.kernels.swiglu import reference as swiglu_reference
from tio_megatron.kernels.swiglu import triton as swiglu
from tio_megatron.testing import assert_same_bytes

ODD = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 3e38]


def same(ours, reference, what):
    for i, (a, b) in enumerate(zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, reference)), strict=True)):
        assert_same_bytes(a, b, f"{what}, result {i}")


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


def test_exp_and_log():
    x = torch.cat([torch.linspace(-110, 95, 1500), torch.tensor(ODD)])
    same(math.KERNELS["exp"](x), math_reference.exp(x), "exp")
    x = torch.cat([torch.rand(1500) * 10, torch.logspace(-38, 38, 100), torch.tensor([*ODD, -1.0])])
    same(math.KERNELS["log"](x), math_reference.log(x), "log")


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 9, 65])
def test_the_tree_of_received_buffers(parts):
    """Minus zero is kept: an absent leaf is skipped, not added as +0."""
    x = torch.randn(parts, 5, 3) * torch.logspace(-4, 4, parts)[:, None, None]
    x[:, 0], x[:, 1, 0] = -0.0, float("inf")
    same(math.tree_add(x), math_reference.tree_add(x), f"{parts} parts")
    if parts > 3:
        with pytest.raises(AssertionError):
            assert_same_bytes(math.tree_add(x.roll(1, 0)), math_reference.tree_add(x), "another order")


@pytest.mark.parametrize("h", [16, 48, pytest.param(256, marks=pytest.mark.full), 320])
def test_rms_norm(h):
    x, w, dy, residual = bf16(37, h) * 3, bf16(h), bf16(37, h), bf16(37, h)
    x[3, 5], x[4] = float("nan"), 0.0
    same(norm.rms_norm(x, w, 1e-6), norm_reference.rms_norm(x, w, 1e-6), "rms_norm")
    same(norm.rms_norm(x[7:8], w, 1e-6), norm.rms_norm(x, w, 1e-6)[7:8], "one row")
    same(norm.add_rms_norm(x, residual, w, 1e-6), norm_reference.add_rms_norm(x, residual, w, 1e-6), "add_rms_norm")
    x[3, 5] = 1.0
    same(norm.rms_norm_backward(dy, x, w, 1e-6), norm_reference.rms_norm_backward(dy, x, w, 1e-6), "rms_norm_backward")
    heads = bf16(4, 3 * h)[:, h : 2 * h]
    same(norm.rms_norm(heads, w, 1e-6), norm_reference.rms_norm(heads, w, 1e-6), "strided")


def test_swiglu():
    x, dy = bf16(7, 64) * 8, bf16(7, 32)
    x[0, :8], x[1, 32:40] = torch.tensor(ODD).bfloat16(), torch.tensor(ODD).bfloat16()
    same(swiglu.silu(x), swiglu_reference.silu(x), "silu")
    same(swiglu.silu_backward(x, x), swiglu_reference.silu_backward(x, x), "silu_backward")
    same(swiglu.swiglu(x), swiglu_reference.swiglu(x), "swiglu")
    same(swiglu.swiglu_backward(dy, x), swiglu_reference.swiglu_backward(dy, x), "swiglu_backward")


@pytest.mark.parametrize("rotated", [32, 16])
def test_rope(rotated):
    x, positions, table = bf16(9, 5, 32)[:, 1:4], torch.randint(0, 50, (9,)), rope_table(64, rotated, 1e4).to(torch.get_default_device())
    for inverse in (False, True):
        same(rope.rope(x, positions, table, inverse), rope_reference.rope(x, positions, table, inverse=inverse), "rope")


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (60, 8), pytest.param(128, 8, marks=pytest.mark.full)])
def test_router(experts, top_k):
    """Ties go to the lower id; a row of NaN takes the first ids; -inf is a probability of 0."""
    logits = torch.randn(21, experts) * 2
    logits[3, 1], logits[4], logits[5, 2], logits[6] = float("nan"), 1.0, float("-inf"), float("nan")
    logits[7, :3] = 5.0
    same(router.scores(logits), router_reference.scores(logits), "scores")
    d = torch.randn(21, top_k)
    for normalise in (True, False):
        ids, probs = router.route(logits, top_k, normalise)
        same((ids, probs), router_reference.route(logits, top_k, normalise), "route")
        assert ids[4].tolist() == list(range(top_k))
        same(router.route_backward(d, logits, ids, normalise), router_reference.route_backward(d, logits, ids, normalise), "route_backward")
    same(router.route(logits[9:10], top_k, True)[1], router.route(logits, top_k, True)[1][9:10], "one token")


@pytest.mark.parametrize(("vocab", "runs"), [(300, 2), pytest.param(700, 8, marks=pytest.mark.full)])
def test_log_softmax(vocab, runs):
    order = VocabOrder(vocab, runs)
    logits = torch.randn(3, order.padded) * 4
    logits[:, vocab:], logits[1, 3], logits[2, 5] = float("nan"), float("nan"), float("-inf")
    top, given = logprob.vocab_max(logits, vocab), (vocab, runs, 128)
    same(top, logprob_reference.vocab_max(logits, vocab), "maximum")
    sums = [logprob.vocab_sumexp(logits, top, *given, 0, order.padded, weighted)[0] for weighted in (False, True)]
    for weighted, whole in zip((False, True), sums, strict=True):
        same(whole, logprob_reference.vocab_sumexp(logits, top, order, 0, order.padded, weighted)[0], "sum")
        half = order.padded // 2
        shards = [logprob.vocab_sumexp(logits[:, lo : lo + half].clone(), top, *given, lo, lo + half, weighted) for lo in (0, half)]
        nodes = [dict(zip(order.frontier(lo, lo + half), shard, strict=True)) for lo, shard in zip((0, half), shards, strict=True)]
        same(order.tree.combine(nodes), whole, "two shards")
    same(logprob.log_softmax(logits, *given), logprob_reference.log_softmax(logits, order), "log_softmax")
    x, target, d = logits[:, 7].contiguous(), torch.tensor([0, -1, vocab - 1]), torch.randn(3)
    same(logprob.gather_logprob(x, top, sums[0]), logprob_reference.gather_logprob(x, top, sums[0]), "gather_logprob")
    same(logprob.entropy(*sums), logprob_reference.entropy(*sums), "entropy")
    backward = (d, logits, top, sums[0])
    same(logprob.logprob_backward(*backward, target, vocab), logprob_reference.logprob_backward(*backward, target, vocab), "logprob_backward")
    same(logprob.entropy_backward(*backward, sums[1], vocab), logprob_reference.entropy_backward(*backward, sums[1], vocab), "entropy_backward")


def test_combine():
    experts, top_k, tokens, h = 12, 4, 6, 40
    ids = torch.stack([torch.randperm(experts)[:top_k].sort().values for _ in range(tokens)])
    rows, index, probs = bf16(tokens * top_k, h), torch.randperm(tokens * top_k).view(tokens, top_k), torch.rand(tokens, top_k)
    index[2, 1], index[3] = -1, -1
    tree = ReductionTree(experts)
    for nodes in ([tree.root], list(tree.frontier(3, 9))):
        at = [node.start for node in nodes], [node.size for node in nodes]
        for weights in (probs, None):
            ours = combine.combine(rows, index, ids, weights, experts, *at)
            same(ours, combine_reference.combine(rows, index, ids, weights, experts=experts, nodes=nodes), "combine")
    for d in (torch.randn(tokens, h), bf16(tokens, h)):
        same(combine.combine_backward(d, rows, index, probs), combine_reference.combine_backward(d, rows, index, probs), "combine_backward")


def test_embedding():
    w, ids = bf16(10, 8), torch.tensor([[3, 12], [19, 10]])
    w[2, 1], w[2, 2] = -0.0, float("nan")
    same(embedding.embedding(ids, w, 10), embedding_reference.embedding(ids, w, 10), "embedding")
    ids, dout = torch.randint(8, 22, (3, 9)), bf16(3, 9, 8)
    same(embedding.embedding_backward(dout, ids, 10, 10), embedding_reference.embedding_backward(dout, ids, 10, 10), "embedding_backward")


def test_balance():
    logits, samples = torch.randn(11, 12) * 2, torch.randint(-1, 3, (11,))
    logits[2, 3] = float("nan")
    ids = router.route(logits, 4, True)[0]
    ids[samples < 0] = -1
    same(router.balance_sums(logits, ids, samples, 3), router_reference.balance_sums(logits, ids, samples, 3), "balance_sums")
    weights = torch.randn(3, 12)
    same(router.balance_backward(logits, weights, samples), router_reference.balance_backward(logits, weights, samples), "balance_backward")

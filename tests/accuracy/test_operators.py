"""Error against float64: no larger than that of torch's own fp32 operator on the same input (root mean square; 10% for luck, since
a whole row shares the error of its sum)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as f

from tio_megatron.contract import ReductionTree, VocabOrder
from tio_megatron.kernels import attention, combine, logprob, math, norm, rope, router, swiglu

Tensor = torch.Tensor
Function = Callable[..., Tensor]
LUCK = 1.1


def _rms(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _compare(ours: Function, stock: Function, *inputs: Tensor) -> None:
    """Forward of ``ours`` and ``stock`` on fp32 against ``stock`` on float64."""
    exact = stock(*(x.double() if x.is_floating_point() else x for x in inputs))
    mine, theirs = _rms(ours(*inputs), exact), _rms(stock(*inputs), exact)
    assert mine <= LUCK * theirs, f"ours {mine:.3e}, stock {theirs:.3e}"


def _compare_gradients(ours: Function, stock: Function, *inputs: Tensor) -> None:
    """The same of the gradients of all floating inputs; the last input is the gradient of the output."""
    *inputs, grad = inputs  # type: ignore[assignment]

    def gradients(function: Function, double: bool) -> list[Tensor]:
        leaves = [(x.double() if double else x).clone().requires_grad_() for x in inputs]
        return list(torch.autograd.grad(function(*leaves), leaves, grad.double() if double else grad))

    for i, (mine, theirs, exact) in enumerate(zip(gradients(ours, False), gradients(stock, False), gradients(stock, True), strict=True)):
        a, b = _rms(mine, exact), _rms(theirs, exact)
        assert a <= LUCK * b or a < 4e-8, f"gradient {i}: ours {a:.3e}, stock {b:.3e}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("low, high", [(-20, 0), (-87, 88), (-1, 1)])
def test_exp(low: float, high: float) -> None:
    _compare(math.exp, torch.exp, torch.empty(200000).uniform_(low, high))


@pytest.mark.parametrize("low, high", [(1e-30, 1.0), (0.5, 2.0), (1.0, 2e5)])
def test_log(low: float, high: float) -> None:
    _compare(math.log, torch.log, torch.empty(200000).uniform_(low, high))


@pytest.mark.parametrize("name", ["exp", "log"])
def test_units_in_the_last_place(name: str) -> None:
    """The errors that kernels/math/reference.py states, and no larger than torch's where results are normal."""
    x = torch.empty(1000000).uniform_(-87.3, 88.7) if name == "exp" else torch.empty(1000000).uniform_(-80, 80).exp()
    exact = getattr(torch, name)(x.double())
    unit = torch.exp2(torch.floor(torch.log2(exact.abs())) - 23)
    worst = {who: float(((y.double() - exact).abs() / unit).max()) for who, y in (("ours", getattr(math, name)(x)), ("torch", getattr(torch, name)(x)))}
    assert worst["ours"] < (0.56 if name == "exp" else 0.79) and worst["ours"] <= worst["torch"]


@pytest.mark.parametrize("h", [128, 2048, 4096])
def test_rms_norm(h: int) -> None:
    rows = 400000 // h
    x, w, dy = torch.randn(rows, h), torch.randn(h), torch.randn(rows, h)

    def stock(x: Tensor, w: Tensor) -> Tensor:
        return f.rms_norm(x, (h,), w, 1e-6)

    _compare(lambda x, w: norm.rms_norm(x, w, 1e-6), stock, x, w)
    _compare_gradients(lambda x, w: norm.rms_norm(x, w, 1e-6), stock, x[:200], w, dy[:200])


def test_silu_and_swiglu() -> None:
    x, dy = torch.randn(100, 512) * 5, torch.randn(100, 512)

    def stock(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return f.silu(gate) * up

    _compare(swiglu.silu, f.silu, x)
    _compare_gradients(swiglu.silu, f.silu, x, dy)
    _compare(swiglu.swiglu, stock, x)
    _compare_gradients(swiglu.swiglu, stock, x, dy[:, :256])


def test_rope() -> None:
    """Stock: fp32 frequencies and angles, as engines compute them; the exact one in float64."""
    positions = torch.randint(0, 40000, (50,))
    table = rope.rope_table(40000, 128, 1e6)

    def stock(x: Tensor) -> Tensor:
        inverse = 1.0 / 1e6 ** (torch.arange(0, 128, 2, dtype=x.dtype) / 128)
        angle = positions.to(x.dtype)[:, None, None] * inverse
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    _compare(lambda x: rope.rope(x, positions, table), stock, torch.randn(50, 4, 128))
    _compare_gradients(lambda x: rope.rope(x, positions, table), stock, torch.randn(50, 4, 128), torch.randn(50, 4, 128))


@pytest.mark.parametrize("normalise", [True, False])
def test_router(normalise: bool) -> None:
    logits, dprobs = torch.randn(2000, 128) * 2, torch.randn(2000, 8)
    ids = router.route(logits, 8)[0]

    def stock(x: Tensor) -> Tensor:
        p = x.softmax(-1).gather(1, ids)
        return p / p.sum(-1, keepdim=True) if normalise else p

    _compare(lambda x: router.route(x, 8, normalise)[1], stock, logits)
    _compare_gradients(lambda x: router.route(x, 8, normalise)[1], stock, logits, dprobs)


def test_combine() -> None:
    rows, probs, dout = torch.randn(800, 2048), torch.rand(100, 8), torch.randn(100, 2048)
    index, ids = torch.randperm(800).view(100, 8), torch.stack([torch.randperm(128)[:8].sort().values for _ in range(100)])

    def stock(rows: Tensor, probs: Tensor) -> Tensor:
        return torch.zeros(100, 2048, dtype=rows.dtype).index_add(0, torch.arange(100).repeat_interleave(8), rows[index.view(-1)] * probs.view(-1, 1))

    _compare(lambda rows, probs: combine.combine(rows, index, ids, probs, experts=128, nodes=[ReductionTree(128).root])[0], stock, rows, probs)
    leaves = [t.double().requires_grad_() for t in (rows, probs)]
    exact = torch.autograd.grad(stock(*leaves), leaves, dout.double())
    single = [t.clone().requires_grad_() for t in (rows, probs)]
    theirs = torch.autograd.grad(stock(*single), single, dout)
    for mine, other, true in zip(combine.combine_backward(dout, rows, index, probs), theirs, exact, strict=True):
        assert mine is not None and _rms(mine, true) <= LUCK * _rms(other, true)


@pytest.mark.parametrize("vocab, bound", [(500, 1.3), (32000, LUCK), (151936, LUCK)])
def test_log_softmax(vocab: int, bound: float) -> None:
    """A vocabulary of a few blocks is mostly the error of one chain of 128, and its gradient a little worse than stock's."""
    rows = max(4, 100000 // vocab)
    x = torch.randn(rows, vocab) * 3
    order = VocabOrder(vocab, 8)
    _compare(lambda x: logprob.log_softmax(x, order), lambda x: x.log_softmax(-1), x)
    target, d = torch.randint(0, vocab, (rows,)), torch.randn(rows)
    top = logprob.vocab_max(x, vocab)
    total = logprob.vocab_sumexp(x, top, order, 0, vocab)[0]
    exact, stock = (
        torch.autograd.grad(y.log_softmax(-1).gather(1, target[:, None]).squeeze(1), y, d.to(y.dtype))[0]
        for y in (x.double().requires_grad_(), x.clone().requires_grad_())
    )
    assert _rms(logprob.logprob_backward(d, x, top, total, target, vocab), exact) <= bound * _rms(stock, exact)


@pytest.mark.parametrize("tokens, heads, groups, size", [(257, 8, 1, 64), (300, 4, 4, 128)])
def test_attention(tokens: int, heads: int, groups: int, size: int) -> None:
    q, k, v, do = torch.randn(tokens, heads, size), torch.randn(tokens, groups, size), torch.randn(tokens, groups, size), torch.randn(tokens, heads, size)
    cu = torch.tensor([0, tokens], dtype=torch.int32)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attention(q, k, v, cu_q=cu, cu_k=cu, scale=size**-0.5)[0]

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    _compare(ours, stock, q, k, v)
    _compare_gradients(ours, stock, q, k, v, do)


def test_bf16_is_the_rounding_of_an_fp32_result() -> None:
    """bf16 in and out: error at most that of one rounding, and no larger than stock's bf16 operator."""
    q, k, v = (torch.randn(200, n, 64).bfloat16() for n in (8, 2, 2))
    cu = torch.tensor([0, 200], dtype=torch.int32)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    exact = stock(q.double(), k.double(), v.double())
    mine, theirs = _rms(attention.attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.125)[0], exact), _rms(stock(q, k, v), exact)
    assert mine <= LUCK * theirs and mine < 2.0**-9

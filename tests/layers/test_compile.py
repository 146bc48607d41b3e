"""A graph compiler gives the bytes of eager mode, forward and backward: every sum and every rounding lies inside an operator it cannot open.

Some functions look at numbers (token ids, lengths of sequences, the rows of each expert) before they call an operator. There the compiler cuts
its graph in two and runs the piece between eagerly; ``WHOLE`` names those it compiles in one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as f

from tio_megatron import rl
from tio_megatron.contract import Contract
from tio_megatron.kernels.rope import rope_table
from tio_megatron.layers.activation import swiglu
from tio_megatron.layers.attention import attention
from tio_megatron.layers.entropy import vocab_entropy
from tio_megatron.layers.experts import CombineRows, ExpertMLP, SpreadRows
from tio_megatron.layers.linear import column_parallel, row_parallel
from tio_megatron.layers.norm import rms_norm
from tio_megatron.layers.permute import plan_rows
from tio_megatron.layers.rope import rope
from tio_megatron.layers.router import route_tokens, router_logits
from tio_megatron.layers.vocab import VocabShard, at_temperature, vocab_embedding, vocab_logits, vocab_logprob
from tio_megatron.testing import assert_same_bytes, first_mismatch

pytestmark = pytest.mark.usefixtures("compiling")
Tensor = torch.Tensor
S, B, H, HEADS, GROUPS, D, E, K, INNER, V = 8, 2, 64, 4, 2, 32, 4, 3, 32, 300
DTYPE = torch.bfloat16
CASTS = {"emulate_precision_casts": True}
"""What Inductor must be told: round bf16 between two elementwise operations, as eager mode does."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))).to(DTYPE)


SHARD = VocabShard(Contract().vocab_order(V), 384)
TABLE = rope_table(64, D, 1e4)
IDS = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(3))


def experts(x: Tensor, router: Tensor, *weights: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    ids, probs = route_tokens(router_logits(rows, router), K, normalise=True)
    plan = plan_rows(ids, 0, E)
    spread = SpreadRows.apply(rows, plan, ids, E)
    return CombineRows.apply(ExpertMLP.apply(spread, plan.offsets, 2, 2, None, None, *weights), probs, plan.index, ids, E).view(x.shape)


def block(x: Tensor, qkv: Tensor, out: Tensor, norms: Tensor, *of_experts: Tensor) -> Tensor:
    """A decoder layer; its two residual sums are torch's own."""
    fused = column_parallel(rms_norm(x, norms[0], 1e-6), qkv, dgrad_leaves=2).view(S, B, HEADS + 2 * GROUPS, D)
    q, k, v = fused.split([HEADS, GROUPS, GROUPS], 2)
    mixed = attention(rope(q, TABLE), rope(k, TABLE), v, scale=D**-0.5).reshape(S, B, HEADS * D)
    x = x + row_parallel(mixed, out, leaves=4)
    return x + experts(rms_norm(x, norms[1], 1e-6), *of_experts)


def model(ids_weight: Tensor, head: Tensor, *of_block: Tensor) -> Tensor:
    x = block(vocab_embedding(IDS, ids_weight, SHARD), *of_block)
    logits = at_temperature(vocab_logits(x, head, SHARD), 0.7)
    return vocab_logprob(logits, IDS, SHARD) + vocab_entropy(logits, SHARD)


def policy(new: Tensor) -> Tensor:
    """The room ``rl`` in one function of fp32 log-probabilities."""
    new = new.float()
    old, advantages = new.detach() * 1.1, new.detach() + 0.4
    ratio, weight = rl.token_ratio(new, old), rl.masked(rl.token_ratio(old, new.detach() * 1.05), 0.9, 1.1)
    return rl.clipped_loss(ratio, advantages, clip=0.1, dual=2.0).loss * weight + 0.1 * rl.kl(new, old) + 0.01 * rl.kl(new, old, "k2")


X, QKV, OUT, NORMS = normal(S, B, H), normal((HEADS + 2 * GROUPS) * D, H), normal(H, HEADS * D), normal(2, H)
EXPERTS = [normal(E, H), *[normal(2 * INNER, H, seed=i) for i in range(E)], *[normal(H, INNER, seed=i) for i in range(E)]]
EMBEDDING, HEAD = normal(SHARD.rows, H), normal(SHARD.rows, H, seed=7)
CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "column": (partial(column_parallel, dgrad_leaves=2), [X, normal(96, H)]),
    "gated column": (partial(column_parallel, dgrad_leaves=2, gated=True), [X, normal(96, H)]),
    "row": (partial(row_parallel, leaves=4), [X, normal(96, H)]),
    "norm": (partial(rms_norm, eps=1e-6), [X, NORMS[0]]),
    "swiglu": (swiglu, [X]),
    "router": (lambda x, w: route_tokens(router_logits(x, w), K, normalise=True)[1], [X, EXPERTS[0]]),
    "rope": (partial(rope, table=TABLE), [normal(S, B, HEADS, D)]),
    "attention": (partial(attention, scale=0.2), [normal(S, B, HEADS, D), normal(S, B, GROUPS, D), normal(S, B, GROUPS, D, seed=1)]),
    "packed attention": (
        partial(attention, scale=0.2, cu_seqlens=torch.tensor([0, 5, 13])),
        [normal(16, HEADS, D), normal(16, GROUPS, D), normal(16, GROUPS, D, seed=1)],
    ),
    "experts": (experts, [X, *EXPERTS]),
    "embedding": (lambda w: vocab_embedding(IDS, w, SHARD), [EMBEDDING]),
    "logprob": (lambda x, w: vocab_logprob(at_temperature(vocab_logits(x, w, SHARD), 0.7), IDS, SHARD), [X, HEAD]),
    "entropy": (lambda x, w: vocab_entropy(vocab_logits(x, w, SHARD), SHARD), [X, HEAD]),
    "policy": (policy, [normal(5, 40)]),
    "block": (block, [X, QKV, OUT, NORMS, *EXPERTS]),
    "model": (model, [EMBEDDING, HEAD, QKV, OUT, NORMS, *EXPERTS]),
}
SLOW = {"gated column", "packed attention", "model"}
WHOLE = {"column", "gated column", "row", "norm", "swiglu", "router"}


def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result and the gradients of all inputs."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return y.detach(), torch.autograd.grad(y, leaves, dy)


def compiled(function: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same, compiled."""
    found = run(torch.compile(function, **options), inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in CASES])
def test_graph_and_eager_agree(name: str) -> None:
    """Captured, differentiated ahead of time and decomposed, then run by torch's own kernels: what every backend starts from."""
    function, inputs = CASES[name]
    assert_same_bytes(run(function, inputs), compiled(function, inputs, backend="aot_eager_decomp_partition", fullgraph=name in WHOLE))


def test_stock_operators_are_opened() -> None:
    """Negative control: torch's log-softmax is decomposed, and gives other bytes."""
    inputs = [normal(64, 256).float()]
    function = partial(f.log_softmax, dim=-1)
    assert first_mismatch(run(function, inputs), compiled(function, inputs, backend="aot_eager_decomp_partition"))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_inductor_and_eager_agree(name: str) -> None:
    function, inputs = CASES[name]
    assert_same_bytes(run(function, inputs), compiled(function, inputs, options=CASTS, fullgraph=name in WHOLE))


@pytest.mark.full
def test_inductor_must_be_told_to_round() -> None:
    """Negative control: two bf16 sums in a row are rounded once, unless it is told."""
    inputs = [normal(64, 256, seed=i) for i in range(3)]

    def sums(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a + b + c

    assert first_mismatch(run(sums, inputs), compiled(sums, inputs))
    assert_same_bytes(run(sums, inputs), compiled(sums, inputs, options=CASTS))

"""Log-softmax over a vocabulary, defined: exact maximum, the sum of exponentials by the vocabulary's tree, two roundings at the end.

``T`` tokens, ``V`` columns (of a shard: its own), ``F`` nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.contract import VocabOrder
from tio_megatron.contract.tree import ABSENT
from tio_megatron.kernels.exact import chain_sum
from tio_megatron.kernels.math import reference as m


def vocab_max(logits: Tensor, true_cols: int) -> Tensor:
    """Largest of the first ``true_cols`` columns, NaN not counted (-inf when nothing is left); a zero is +0."""
    if true_cols == 0:
        return torch.full(logits.shape[:1], float("-inf"), dtype=torch.float32)
    true = logits[:, :true_cols]
    return torch.where(true.isnan(), float("-inf"), true).amax(-1) + 0.0


NEVER = -128.0
"""exp is +0 well above it, so a weight may be cut there: 0 * -inf is no NaN."""


def vocab_sumexp(logits: Tensor, top: Tensor, order: VocabOrder, lo: int, hi: int, weighted: bool = False) -> Tensor:
    """``[F, T]``: the nodes of the rank that holds the vocabulary's rows ``[lo, hi)``; columns past the true vocabulary are never read.

    ``weighted``: the terms are exp(d) * d, rounded, instead of exp(d), with d = x - max.
    """
    leaves = torch.full((order.tree.leaves, logits.shape[0]), ABSENT, dtype=torch.float32)
    for start in range(lo, min(hi, order.vocab), order.block):
        stop = min(start + order.block, order.vocab)
        d = logits[:, start - lo : stop - lo] - top.unsqueeze(-1)
        leaves[order.leaf(start)] = chain_sum(m.exp(d) * d.clamp(min=NEVER) if weighted else m.exp(d))
    out = []
    for node in order.frontier(lo, hi):
        part = leaves[node.start : node.stop]
        while part.shape[0] > 1:
            part = part[0::2] + part[1::2]
        out.append(part[0])
    return torch.stack(out) if out else torch.empty(0, logits.shape[0], dtype=torch.float32)


def gather_logprob(x: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """``(x - max) - log(sum)``."""
    return (x - top) - m.log(total)


def log_softmax(logits: Tensor, order: VocabOrder) -> Tensor:
    """``[T, V]`` fp32 of whole rows."""
    top = vocab_max(logits, order.vocab)
    total = vocab_sumexp(logits, top, order, 0, order.padded)[0]
    return gather_logprob(logits[:, : order.vocab], top.unsqueeze(-1), total.unsqueeze(-1))


def logprob_backward(d: Tensor, logits: Tensor, top: Tensor, total: Tensor, target: Tensor, true_cols: int) -> Tensor:
    """``dlogits[T, V]`` = d * (onehot - exp(x - max) / sum); +0 past ``true_cols``. ``target`` is local, negative where it is elsewhere."""
    out = torch.zeros_like(logits)
    p = m.exp(logits[:, :true_cols] - top.unsqueeze(-1)) / total.unsqueeze(-1)
    hot = target.unsqueeze(-1) == torch.arange(true_cols)
    out[:, :true_cols] = d.unsqueeze(-1) * (hot.float() - p)
    return out


def entropy(total: Tensor, weighted: Tensor) -> Tensor:
    """``log(S) - W / S`` with S the sum of exp(d) and W that of exp(d) * d."""
    return m.log(total) - weighted / total


def entropy_backward(d: Tensor, logits: Tensor, top: Tensor, total: Tensor, weighted: Tensor, true_cols: int) -> Tensor:
    """``dlogits[T, V]`` = d * (p * (W / S - (x - max))) with p = exp(x - max) / S; +0 past ``true_cols``."""
    out = torch.zeros_like(logits)
    low = logits[:, :true_cols] - top.unsqueeze(-1)
    p = m.exp(low) / total.unsqueeze(-1)
    out[:, :true_cols] = d.unsqueeze(-1) * (p * ((weighted / total).unsqueeze(-1) - low.clamp(min=NEVER)))
    return out

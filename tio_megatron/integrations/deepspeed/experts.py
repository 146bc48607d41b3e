"""A DeepSpeed layer's expert modules on sorted rows: whatever they are made of, each sees the rows of one micro-batch at a time.

So what an expert computes, and each partial of its gradients, belongs to one expert and one micro-batch, whichever ranks they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tio_megatron.integrations.deepspeed.linears import is_ordered
from tio_megatron.integrations.deepspeed.sums import micro_batch_sum


def run_experts(experts: Sequence[nn.Module], rows: Tensor, counts: Tensor) -> Tensor:
    """Rows through their experts.

    Args:
        experts: of this rank.
        rows: [R, M], sorted by expert, then by the micro-batch they come from.
        counts: [experts, sources] int64, rows of each.

    Returns:
        [R, M], each expert's output for its rows.
    """
    parts = rows.split(counts.reshape(-1).tolist())
    sources = counts.shape[1]
    out = [_one(expert, part) for e, expert in enumerate(experts) for part in parts[e * sources : (e + 1) * sources] if len(part)]
    return torch.cat(out) if out else rows


def _one(expert: nn.Module, rows: Tensor) -> Tensor:
    # Stock hands over [sources, 1, capacity, M].
    given = rows.view(1, 1, *rows.shape)
    tapped = {name: _Tap.apply(parameter) for name, parameter in _others(expert)} if torch.is_grad_enabled() else {}
    out = functional_call(expert, tapped, (given,)) if tapped else expert(given)
    # Stock ignores what comes besides, a bias.
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found.reshape(len(rows), -1)


def _others(expert: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Trained parameters whose gradients would come through autograd, which adds up those of all calls before anybody sees them."""
    for prefix, module in expert.named_modules():
        if not is_ordered(module):
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if micro_batch_sum(parameter) is not None:
                    yield name, parameter


class _Tap(torch.autograd.Function):
    """The parameter itself; the gradient of this use goes to its sum as one partial."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.kept = micro_batch_sum(parameter)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> None:
        ctx.kept.add(d)

"""One loss from one number per token: every token has one weight, known before the first backward, and the loss is the sum of products.

A mean of means over micro-batches and ranks depends on how the batch was cut. A weight from the whole batch does not: each token's gradient is
its weight times the gradient of its own loss, whatever else lies in its micro-batch.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tio_megatron.rl.exact import ExactSum, rounded
from tio_megatron.rl.sequences import spread

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def token_weights(sequence: Tensor, lengths: Tensor, mode: str = "token-mean", *, horizon: int | None = None) -> Tensor:
    """The weight of every token, fp32, from whole numbers with one rounding::

        token-mean                 1 / (n_1 + ... + n_N)      all tokens alike (DAPO)
        seq-mean-token-mean        1 / (M * n_i)              all sequences alike (GRPO)
        seq-mean-token-sum         1 / M
        seq-mean-token-sum-norm    1 / (M * horizon)          (Dr. GRPO)

    Args:
        sequence: int64, the sequence of each token this rank and micro-batch has; -1 is no token and weighs 0.
        lengths: ``[N]`` int64, ``n_i``: how many tokens of sequence i carry loss, for *all* sequences of the global batch. ``M`` of them have any.
        mode: one of the four above.
        horizon: the constant of the last mode, such as the longest response allowed.

    Raises:
        ValueError: an unknown mode, no token at all, a missing or needless horizon, or a token of a sequence that ``lengths`` says has none.
    """
    if mode not in MODES:
        raise ValueError(f"token_weights: mode {mode!r} is unknown; use one of {MODES}")
    if (horizon is not None) != (mode == "seq-mean-token-sum-norm") or (horizon is not None and horizon < 1):
        raise ValueError(f"token_weights: mode {mode!r} with horizon {horizon}; seq-mean-token-sum-norm needs a positive one, the others take none")
    counts = [int(n) for n in lengths.tolist()]
    alive = sum(n > 0 for n in counts)
    if not alive or min(counts) < 0:
        raise ValueError(f"token_weights: lengths must not be negative, and at least one positive; got {counts[:8]}{' ...' if len(counts) > 8 else ''}")
    there = sequence[sequence >= 0]
    if there.numel() and (int(there.max()) >= len(counts) or not bool((lengths[there] > 0).all())):
        raise ValueError(f"token_weights: tokens of sequences up to {int(there.max())}, but lengths has {len(counts)} sequences, or says 0 for one of them")
    divisors = {
        "token-mean": lambda n: sum(counts),
        "seq-mean-token-mean": lambda n: alive * n,
        "seq-mean-token-sum": lambda n: alive,
        "seq-mean-token-sum-norm": lambda n: alive * (horizon or 1),
    }
    return spread(rounded([Fraction(1, divisors[mode](n)) if n else 0.0 for n in counts]), sequence)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """``sum of w_t * l_t`` over the tokens given: each product rounded, then their exact sum, rounded once. Differentiable by ``losses``.

    The gradient of ``losses`` is ``weights``. A token of weight 0 is not read, and its gradient is +0. A loss that is infinite already makes the sum
    infinite, or NaN with one of the other sign. Add the parts of micro-batches and ranks with
    ``ExactSum.of(losses * weights)`` where a report needs the bytes of the whole.

    Args:
        losses, weights: fp32 of one shape.

    Raises:
        ValueError: shapes or types that do not fit, or a product of two finite numbers beyond fp32: the sum would not be that of the terms.
    """
    if losses.shape != weights.shape or losses.dtype != torch.float32 or weights.dtype != torch.float32:
        raise ValueError(
            f"weighted_sum: both must be torch.float32 of one shape, got {losses.dtype} {list(losses.shape)} and {weights.dtype} {list(weights.shape)}"
        )
    return _WeightedSum.apply(losses, weights)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        products = losses * weights
        beyond = products.isinf() & losses.isfinite() & weights.isfinite()
        if bool(beyond.any()):
            at = beyond.nonzero()[0].tolist()
            raise ValueError(
                f"weighted_sum: {float(losses[tuple(at)])} * {float(weights[tuple(at)])} at {at} is beyond fp32; token_weights are at most 1, "
                "so divide the losses by a constant first"
            )
        return ExactSum.of(products, torch.where(weights == 0, -1, 0)).values()[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return (dy * weights).masked_fill(weights == 0, 0.0), None

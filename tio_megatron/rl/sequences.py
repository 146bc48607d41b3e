"""From tokens to their sequences and back. Sums over a sequence are exact, so packing, padding and context parallelism change no byte."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.layers.grains import Group
from tio_megatron.rl.exact import ExactSum


def one_shape(what: str, **tensors: Tensor) -> None:
    """Refuse numbers per token that are not as many: broadcast, they would be another token's.

    Raises:
        ValueError: names every shape.
    """
    if len({x.shape for x in tensors.values()}) > 1:
        got = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"{what}: all must be of one shape, one number per token; got {got}")


def sequence_sums(x: Tensor, sequence: Tensor, sequences: int, *, group: Group = None) -> Tensor:
    """``[N]`` fp32: the sum of ``x`` over the tokens of each sequence, rounded once. Not differentiable.

    Args:
        x: floating point, one number per token.
        sequence: int64 of the same shape, the token's sequence or -1.
        sequences: ``N``; a sequence of which this rank has no token gives +0.
        group: ranks that hold other tokens of the same sequences (context parallelism).

    Raises:
        ValueError: shapes or numbers that do not fit.
    """
    return ExactSum.of(x, sequence, sequences).over(group).values()


def sequence_means(x: Tensor, sequence: Tensor, sequences: int, *, group: Group = None) -> Tensor:
    """``[N]`` fp32: the mean instead; NaN for a sequence without tokens. Arguments as in :func:`sequence_sums`."""
    return ExactSum.of(x, sequence, sequences).over(group).means()


def spread(values: Tensor, sequence: Tensor) -> Tensor:
    """One number per token from one per sequence: ``values[N]`` at each token's sequence, 0 where there is none.

    >>> spread(torch.tensor([0.5, 2.0]), torch.tensor([[-1, 0, 0], [1, -1, 1]]))
    tensor([[0.0000, 0.5000, 0.5000],
            [2.0000, 0.0000, 2.0000]])
    """
    return torch.where(sequence >= 0, values[sequence.clamp(min=0)], torch.zeros((), dtype=values.dtype))

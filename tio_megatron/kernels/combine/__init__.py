"""The sum of a token's expert rows over the expert axis. Which rank owns which expert is the caller's business: it asks for its nodes.

``T`` tokens, ``k`` choices, ``R`` rows, ``H`` hidden, ``E`` experts, ``F`` nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.contract import Node
from tio_megatron.kernels.combine import cpu
from tio_megatron.kernels.operands import check_activations, check_dtype, check_shape, require

__all__ = ["combine", "combine_backward"]


def _check(what: str, rows: Tensor, index: Tensor, probs: Tensor | None) -> None:
    check_activations(what, {"rows": rows})
    check_shape(what, "rows", rows, -1, -1)
    check_dtype(what, "index", index, torch.int64)
    check_shape(what, "index", index, -1, -1)
    if probs is not None:
        check_dtype(what, "probs", probs, torch.float32)
        check_shape(what, "probs", probs, *index.shape)


def combine(rows: Tensor, index: Tensor, ids: Tensor, probs: Tensor | None, *, experts: int, nodes: Sequence[Node]) -> Tensor:
    """Weight each row by its probability (one rounding) and add a token's rows by the tree over experts, in fp32.

    Args:
        rows: ``[R, H]`` fp32 or bf16, expert outputs rounded to the activation type.
        index: ``[T, k]`` int64, the row of each choice; -1: not on this rank (such a choice's id and probability are not read).
        ids: ``[T, k]`` int64, the expert of each choice, ascending where ``index`` is not -1.
        probs: ``[T, k]`` fp32, or None when the rows are weighted already.
        experts: E, all of them, not this rank's.
        nodes: which nodes of ``ReductionTree(E)``: ``frontier(lo, hi)`` of this rank's experts, or ``[root]``. Choices whose expert is in
            none of the nodes are not added.

    Returns:
        ``[F, T, H]`` fp32. A node with no term is -0, the identity of addition, so that the nodes of several ranks may simply be added
        (add +0 to a finished sum to make an empty token +0).

    Raises:
        ValueError: shapes or types do not fit, a row or an expert is out of range, or the ids of a token do not ascend.
    """
    _check("combine", rows, index, probs)
    check_dtype("combine", "ids", ids, torch.int64)
    check_shape("combine", "ids", ids, *index.shape)
    require(experts >= 1, "combine", f"experts is {experts}; there must be at least one")
    return cpu.combine(rows, index, ids, probs, experts, [node.start for node in nodes], [node.size for node in nodes])


def combine_backward(dout: Tensor, rows: Tensor, index: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradient of the root of :func:`combine` (of every node it is the same).

    Args:
        dout: ``[T, H]`` fp32 or bf16.
        rows, index, probs: as given to :func:`combine`.

    Returns:
        ``drows[R, H]`` in the type of rows, ``round(dout * prob)``, +0 for rows no token chose; ``dprobs[T, k]`` fp32, the sum over H of dout * row
        in the norm's order, +0 where ``index`` is -1 (None without probs).

    Raises:
        ValueError: shapes or types do not fit, or a row is out of range.
    """
    _check("combine_backward", rows, index, probs)
    check_activations("combine_backward", {"dout": dout})
    check_shape("combine_backward", "dout", dout, index.shape[0], rows.shape[1])
    drows, dprobs = cpu.combine_backward(dout, rows, index, probs)
    return drows, None if probs is None else dprobs

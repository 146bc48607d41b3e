"""Rows to experts and back on an NPU, by the operators that move: ``npu_moe_token_permute`` and ``npu_moe_token_unpermute``.

*Built, not run.* Both only move here. The sum over a token's experts stays with ``combine`` and its tree: the operators' own adds the rows in the order in
which the experts were chosen, which is not the contract's.

``T`` tokens, ``k`` choices, ``H`` hidden, ``R`` = T * k rows.
"""

from __future__ import annotations

from torch import Tensor

from tio_megatron.kernels.npu.calls import find
from tio_megatron.kernels.npu.limits import check_permute, check_unpermute


def to_experts(tokens: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert and, inside one, by token.

    Args:
        tokens: ``[T, H]`` bf16.
        ids: ``[T, k]`` int64, at least 0: a padding token takes an id above all experts, so that its rows come last.

    Returns:
        ``rows[R, H]`` and ``where[R]`` int32: the row of each choice, in the order of tokens and choices.

    Raises:
        ValueError: the documents forbid the shapes or types.
    """
    check_permute(tokens, ids)
    rows, where = find("npu_moe_token_permute")(tokens, ids, ids.numel())
    return rows, where


def from_experts(rows: Tensor, where: Tensor, choices: int) -> Tensor:
    """The rows of each token's choices side by side, ``[T, k, H]``, for ``combine``. Moved, not added.

    Raises:
        ValueError: the documents forbid the shapes or types.
    """
    check_unpermute(rows, where)
    moved = find("npu_moe_token_unpermute")(rows, where)
    return moved.view(-1, choices, rows.shape[-1])

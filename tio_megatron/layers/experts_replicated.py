"""The expert layer where every rank sees all tokens: vLLM with TP or expert parallelism, Megatron's allgather dispatcher.

No token travels. A rank runs its experts (whole ones, or a slice of each) on the rows routed to them and adds what it can by the tree
over the expert axis; the ranks' nodes are then joined. See ``docs/contract.md``, section 3.

Shapes: T tokens, H hidden, E experts, k choices of a token, I width of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed import ProcessGroup

from tio_megatron import collectives
from tio_megatron.contract import Node, ReductionTree
from tio_megatron.layers.experts import Weights, expert_mlp, expert_nodes, finish_sum
from tio_megatron.layers.permute import plan_rows

FEW_CHOICES = 1024
"""128 tokens of 8 choices: what a step that decodes has. Not measured: no accelerator has run it."""


def experts_replicated(
    x: torch.Tensor,
    ids: torch.Tensor,
    probs: torch.Tensor,
    w13: Weights,
    w2: Weights,
    *,
    experts: int,
    leaves: int,
    span: tuple[int, int] | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
    ep_group: ProcessGroup | None = None,
    etp_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Args:
        x: [T, H] bf16 or fp32, all tokens.
        ids: [T, k] int64, ascending expert ids; no padding.
        probs: [T, k] fp32.
        w13, w2: this rank's experts ``[lo, hi)``: gate and up [hi - lo, 2 I, H], down [hi - lo, H, I] (I is this rank's slice with
            ``etp_group``).
        experts: E.
        leaves: leaves of this rank's slice of I.
        span: this rank's experts ``(lo, hi)``; all of them by default.
        spans: every rank's experts, by rank in ``ep_group``.
        ep_group: the ranks that share out the experts, or None.
        etp_group: the ranks that share out each expert, or None.

    Returns:
        [T, H] in the type of ``x``, the same bytes on every rank, for every ``span`` and group.

    Raises:
        ValueError: ``spans`` does not cover the experts, or ``span`` is not one of them.
    """
    lo, hi = span if span is not None else (0, experts)
    if ep_group is not None:
        frontiers = _frontiers(experts, tuple(spans or ()))
        if (lo, hi) not in (spans or ()):
            raise ValueError(f"experts [{lo}, {hi}) are none of the group's spans {list(spans or ())}")
    elif (lo, hi) != (0, experts):
        raise ValueError(f"experts [{lo}, {hi}) of {experts} without a group that holds the others")
    plan = plan_rows(ids, lo, hi, every=ep_group is None, padded=_few(ids))  # either way nothing waits for the device
    rows = expert_mlp(x.index_select(0, plan.token), plan.offsets, w13, w2, leaves=leaves, group=etp_group)
    nodes = expert_nodes(rows, plan.index, ids, probs, experts=experts, lo=lo, hi=hi)
    root = nodes[0] if ep_group is None else collectives.all_reduce_nodes(nodes, frontiers, ReductionTree(experts), ep_group)
    return finish_sum(root, ids, x.dtype)


def _few(ids: torch.Tensor) -> bool:
    """Whether computing rows of other ranks' experts costs less than asking an accelerator how many are this rank's. Changes no byte."""
    return not ids.is_cpu and ids.numel() <= FEW_CHOICES


@lru_cache(maxsize=64)
def _frontiers(experts: int, spans: tuple[tuple[int, int], ...]) -> tuple[tuple[Node, ...], ...]:
    covered = 0
    for lo, hi in spans:
        if lo != covered:
            raise ValueError(f"spans {list(spans)} do not cover the experts one after another")
        covered = hi
    if covered != experts:
        raise ValueError(f"spans {list(spans)} do not cover {experts} experts")
    tree = ReductionTree(experts)
    return tuple(tree.frontier(lo, hi) for lo, hi in spans)

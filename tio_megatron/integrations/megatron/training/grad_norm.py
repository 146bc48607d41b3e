"""The norm of all gradients, exact and each parameter counted once, and clipping by it. The arithmetic is ``kernels.squares``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tio_megatron.collectives import wire
from tio_megatron.kernels.squares import add_squares_, empty_sum, root, scale_
from tio_megatron.layers.optimizer import Adam

logger = logging.getLogger(__name__)


def norm_of(parts: Sequence[tuple[Sequence[torch.Tensor], dist.ProcessGroup | None]]) -> float:
    """The norm over all parts: each is the gradients (fp32) this rank counts, and the group whose ranks count the rest of that part.

    Parts with one group share its one reduction, 160 bytes of integers. A collective over each group.

    Returns:
        The same float64 on every rank, whatever the layout; infinity or NaN where a gradient is.
    """
    sums: list[tuple[dist.ProcessGroup | None, torch.Tensor]] = []
    device = next((grad.device for grads, _ in parts for grad in grads), torch.device("cpu"))
    for grads, group in parts:
        total = next((total for known, total in sums if known is group or known == group), None)
        if total is None:
            total = empty_sum(device)
            sums.append((group, total))
        for grad in grads:
            add_squares_(total, grad)
    whole = empty_sum()
    for group, total in sums:
        total = total.to(wire.device(group))
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        whole += total.cpu()
    return root(whole)


def grad_norm_fp32(original: Callable[..., float]) -> Callable[..., float]:
    """``get_grad_norm_fp32``: the exact norm. The largest element (``norm_type`` infinity) has no order and stays stock's."""

    def get_grad_norm_fp32(
        grads_for_norm: Sequence[torch.Tensor] | torch.Tensor, norm_type: float = 2, grad_stats_parallel_group: dist.ProcessGroup | None = None
    ) -> float:
        if float(norm_type) == math.inf:
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)
        if float(norm_type) != 2.0:
            raise ValueError(f"gradient norm: norm_type={norm_type!r} has no order-free sum; 2 or infinity would work")
        grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
        return norm_of([(grads, grad_stats_parallel_group)])

    return get_grad_norm_fp32


def chained_grad_norm(original: Callable[..., float]) -> Callable[..., float]:
    """``ChainedOptimizer.get_grad_norm``: one exact sum over dense and expert parameters, where stock adds the squares of two rounded norms."""

    @torch.no_grad()
    def get_grad_norm(self: Any) -> float:
        for optimizer in self.chained_optimizers:
            inner = getattr(optimizer, "optimizer", None)
            if inner is not None and not isinstance(inner, Adam):
                raise RuntimeError(f"this optimizer was built outside tio_megatron.apply(): its steps are {type(inner).__module__}'s; build it again")
        norm = norm_of([(optimizer.get_main_grads_for_grad_norm(), optimizer.get_grad_stats_parallel_group()) for optimizer in self.chained_optimizers])
        self.tio_skip = not math.isfinite(norm)
        return norm

    return get_grad_norm


def clip_by_norm(original: Callable[..., None]) -> Callable[..., None]:
    """``clip_grad_by_total_norm_fp32``: one product of each element by one fp32 coefficient; nothing when the norm is not finite."""

    def clip_grad_by_total_norm_fp32(
        parameters: Sequence[torch.Tensor] | torch.Tensor, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
    ) -> None:
        if use_decoupled_grad:
            raise ValueError("clipping: use_decoupled_grad=True belongs to the precision-aware optimizer, which is not supported; False would work")
        coefficient = max_norm / (total_norm + 1.0e-6)
        if not math.isfinite(total_norm) or not coefficient < 1.0:
            return
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            if parameter.grad is not None:
                scale_(parameter.grad.detach(), coefficient)

    return clip_grad_by_total_norm_fp32


def step_unless_skipped(original: Callable[..., bool]) -> Callable[..., bool]:
    """``ChainedOptimizer.step_with_ready_grads``: no rank steps when the norm of the gradients, the same on all, is not finite."""

    def step_with_ready_grads(self: Any) -> bool:
        if getattr(self, "tio_skip", False):
            self.tio_skip = False
            logger.error("a gradient is infinite or NaN: this step is skipped on every rank; weights and moments are unchanged")
            return False
        return original(self)

    return step_with_ready_grads

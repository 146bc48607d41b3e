"""Gradients as exact integer sums over micro-batches: where a parameter's partials are kept, how ranks join them, when they become fp32.

DeepSpeed knows no samples or positions, only micro-batches: a loss is a mean over one, and whatever a module does with its rows is done with those
of one. So the unit of a sum is the micro-batch: each gives one fp32 partial of every parameter (an expert's: one for each micro-batch that sent it
rows), partials are added as integers, and the sum is divided once, by the number of micro-batches in the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tio_megatron.contract.grid import Grid
from tio_megatron.kernels.embedding import embedding_backward
from tio_megatron.kernels.integer_sum import IntegerSum, add_rows, untouched_zeros, value
from tio_megatron.layers import grads
from tio_megatron.layers.gradient_sums import BadGradient, ParameterSum, ToSums, add_over, sum_of
from tio_megatron.layers.grains import rank


@dataclass(frozen=True)
class Place:
    """Who shares a parameter's sum.

    ``micro_batches``: the ranks that saw other micro-batches and hold the same elements. ``shards``: those that hold other elements of the same
    tensor; ``None`` where this rank holds all of them. ``copied``: a rank before this one in tensor parallelism has the same, from the same
    micro-batches. ``held``: the ranks over which ZeRO cuts it, where those are more than ``micro_batches``.
    """

    micro_batches: Any
    shards: Any = None
    copied: bool = False
    held: Any = None

    @property
    def counts(self) -> bool:
        """Whether this rank, of all that hold these elements, counts them in the norm."""
        return not self.copied and rank(self.held or self.micro_batches) == 0


class MicroBatchSum(ParameterSum):
    """The sum of one parameter over micro-batches. ``place``: who shares it."""

    def __init__(self, name: str, parameter: Tensor, place: Place, grid: Grid) -> None:
        """``parameter`` of any shape, on this rank."""
        shape = tuple(parameter.shape) if parameter.dim() == 2 else (1, parameter.numel())
        device = parameter.device
        low, high = torch.zeros(shape, dtype=torch.int64, device=device), untouched_zeros(shape, device=device)
        super().__init__(name, parameter, IntegerSum(low, high, torch.zeros(1, device=device), grid.unit(0.0), grid.split_of(0.0)), grid)
        self.place = place
        self.hook: Any = None

    def add_rows(self, dy: Tensor, ids: Tensor) -> None:
        """The rows of this micro-batch at their places in the table, as one partial."""
        self.add(embedding_backward(dy, ids, self.parameter.shape[0], 0))

    def add(self, partial: Tensor) -> None:
        """One partial, of the parameter's shape; fp32 or bf16."""
        rows = partial.reshape(self.sums.low.shape)
        add_rows(self.sums, rows.contiguous(), torch.arange(len(rows), device=rows.device))
        self.partials += 1

    def finish(self, divisor: int) -> Tensor:
        """The sum over ``divisor`` as fp32, of the parameter's shape; the integers are empty afterwards, on the next step's grid."""
        s = self.sums
        out = torch.empty(s.low.numel(), dtype=torch.float32, device=s.low.device)
        value(s.low.view(-1), s.high.view(-1) if self.uses_second else None, s.unit, s.split, out)
        out /= divisor
        self.largest = self.grid.remember(self.largest, float(s.peak))
        self.reset()
        return out.view(self.parameter.shape)

    def reset(self) -> None:
        """Empty, on the grid that :attr:`largest` gives."""
        s = self.sums
        s.low.zero_()
        if self.uses_second or not float(s.peak) < float("inf"):
            # New memory in place of zeros, so that what a rare large partial touched is given back.
            s.high = untouched_zeros(s.low.shape, device=s.low.device)
        s.peak.zero_()
        # Never finer than at first: DeepSpeed copies one expert into all, so a gate's first gradients are roundings, and the next are not.
        s.unit, s.split = max(self.grid.unit(self.largest), self.grid.first), self.grid.split_of(self.largest)
        self.partials = 0


def micro_batch_sum(parameter: Tensor) -> MicroBatchSum | None:
    """The sum of a parameter that a DeepSpeed engine trains under a contract."""
    found = sum_of(parameter)
    return found if isinstance(found, MicroBatchSum) else None


class GradientSums:
    """The sums of all parameters that one engine trains.

    Args:
        parameters: names, parameters, who shares each, and the grid of its partials.
        micro_batches: in the global batch, over all ranks.
        here: of them on each rank, in one step.
        refuse_run: raises when the contract that the engine was built under is not in force.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor, Place, Grid]], micro_batches: int, here: int, refuse_run: Callable[[], None]) -> None:
        self.parameters = [MicroBatchSum(*one) for one in parameters]
        self.micro_batches, self.here, self.seen = micro_batches, here, 0
        for p in self.parameters:
            before = micro_batch_sum(p.parameter)
            if before is not None and before.hook is not None:
                before.hook.remove()  # of an earlier engine on the same model
            p.parameter.tio_sum = p  # type: ignore[attr-defined]
            p.hook = p.parameter.register_post_accumulate_grad_hook(_taker(p, refuse_run))
        grads.use(ToSums())

    def settle(self) -> dict[int, Tensor]:
        """After the last micro-batch of a step: the gradients, fp32, by ``id`` of the parameter. A collective over the world.

        Raises:
            ValueError: this step had another number of micro-batches than the configuration says.
            BadGradient: on all ranks, when any partial is NaN, infinite or too large, or there are too many. Nothing has changed then.
        """
        seen, self.seen = self.seen, 0
        if seen != self.here:
            self._forget()
            raise ValueError(
                f"{seen} backward passes since the last step, and gradient_accumulation_steps says {self.here}: the mean over micro-batches would be another. "
                "Nothing was changed, and the step's gradients are forgotten: call backward() that often before each step(), and "
                "go on with the next global batch"
            )
        self._agree_on_peaks()
        self._refuse_bad()
        by_group: dict[int, tuple[Any, list[MicroBatchSum]]] = {}
        for p in self.parameters:
            by_group.setdefault(id(p.place.micro_batches), (p.place.micro_batches, []))[1].append(p)
        for group, members in by_group.values():
            add_over([p.sums.low for p in members], group)
            add_over([p.sums.high for p in members if p.uses_second], group)
        return {id(p.parameter): p.finish(self.micro_batches) for p in self.parameters}

    def _agree_on_peaks(self) -> None:
        """The largest partial of a logical tensor, over micro-batches and shards."""
        groups = {id(g): g for p in self.parameters for g in (p.place.micro_batches, p.place.shards) if g is not None}
        for key, group in groups.items():
            members = [p for p in self.parameters if key in (id(p.place.micro_batches), id(p.place.shards))]
            peaks = torch.cat([p.sums.peak for p in members])
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
            for p, peak in zip(members, peaks.split(1), strict=True):
                p.sums.peak.copy_(peak)

    def _refuse_bad(self) -> None:
        bad = [line for p in self.parameters if (line := _problem(p))]
        count = torch.tensor([len(bad)])
        dist.all_reduce(count)
        if int(count):
            each: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(each, bad[:2])
            self._forget()
            lines = "; ".join(f"rank {at}: {line}" for at, theirs in enumerate(each) for line in theirs)
            raise BadGradient(
                f"this step's gradients cannot be used ({lines}). Nothing was changed, and the step's gradients are forgotten: skip the batch, or lower the "
                "learning rate; go on with the next global batch, without step()"
            )

    def _forget(self) -> None:
        for p in self.parameters:
            p.reset()


def _problem(p: MicroBatchSum) -> str | None:
    return p.problem(p.place.micro_batches.size() if p.place.micro_batches is not None else 1)


def _taker(p: MicroBatchSum, refuse_run: Callable[[], None]) -> Callable[[Tensor], None]:
    """What autograd has summed of one micro-batch is a partial; nothing is left for DeepSpeed to add up."""

    def take(parameter: Tensor) -> None:
        refuse_run()
        if parameter.grad is not None:
            p.add(parameter.grad.detach())
            parameter.grad = None

    return take

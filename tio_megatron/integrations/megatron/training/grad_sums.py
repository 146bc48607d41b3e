"""Gradients as exact integer sums in megatron-core's DDP: where they are kept, how ranks join them, and when they become fp32 again.

DDP's fp32 gradient buffer is the front half of a buffer of 64-bit integers. During the backward passes the integers are valid; ranks add
them (in any order, by any collective: integers have none); :func:`settle` then turns each into its fp32 number in place, and stock's
optimizer finds gradients where it expects them. ``zero_grad_buffer()`` opens the sums again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from tio_megatron.contract.grid import PRODUCTS, ROWS, TERMS, Grid
from tio_megatron.integrations.megatron.training.grad_refusals import Seen, refuse_bad_step
from tio_megatron.kernels.integer_sum import IntegerSum, untouched_zeros, value
from tio_megatron.layers.gradient_sums import ParameterSum, add_over


class BufferPart(ParameterSum):
    """The sum of one parameter's shard, in a buffer. ``foreign``: a gradient came from elsewhere and was left out."""

    def __init__(self, name: str, parameter: Any, sums: IntegerSum, grid: Grid, home: BufferSums, start: int, end: int) -> None:
        """``parameter`` lies at ``start`` to ``end`` of the buffer."""
        super().__init__(name, parameter, sums, grid)
        self.home, self.start, self.end = weakref.ref(home), start, end
        self.foreign = False

    def open(self) -> IntegerSum:
        """The sum, to be added to.

        Raises:
            RuntimeError: it was turned into fp32 already.
        """
        home = self.home()
        if home is None or not home.adding:
            raise RuntimeError(f"gradient of {self.name}: a backward pass after the gradients were finalized; call zero_grad_buffer() before the next step")
        self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return self.sums

    def returned(self) -> Tensor | None:
        """DDP's hook asserts a gradient when reduction overlaps with the backward pass; it does not read it."""
        home = self.home()
        assert home is not None
        return torch.zeros_like(self.parameter) if home.buffer.ddp_config.overlap_grad_reduce else None


class BufferSums:
    """The integers behind one of DDP's gradient buffers."""

    def __init__(self, buffer: Any, names: dict[Any, str]) -> None:
        """Moves ``buffer``'s fp32 gradients to the front half of new integers; parameters and buckets follow."""
        self.buffer = buffer
        device = buffer.grad_data.device
        self.low = torch.zeros(buffer.numel, dtype=torch.int64, device=device)
        self.high = untouched_zeros((buffer.numel,), device=device)
        self.peaks = torch.zeros(len(buffer.params), device=device)
        self.adding = True
        self.seen = Seen()
        buffer.grad_data = self.low.view(torch.float32)[: buffer.numel]
        self.parameters: list[BufferPart] = []
        for number, parameter in enumerate(sorted(buffer.params, key=lambda p: buffer.param_index_map[p][0])):
            start, end, _ = buffer.param_index_map[parameter]
            name = names[parameter]
            grid = _grid_of(parameter, name)
            low, high = (t[start:end].view(parameter.shape) for t in (self.low, self.high))
            sums = IntegerSum(low, high, self.peaks[number : number + 1], grid.unit(0.0), grid.split_of(0.0))
            parameter.main_grad = buffer.grad_data[start:end].view(parameter.shape)
            parameter.tio_sum = BufferPart(name, parameter, sums, grid, self, start, end)
            self.parameters.append(parameter.tio_sum)
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel()
            bucket.grad_data = buffer.grad_data[bucket.offset : bucket.offset + size]
            bucket.tio_low = self.low[bucket.offset : bucket.offset + size]

    def reset(self) -> None:
        """Empty sums, on the grid that the last step's largest partials give."""
        self.low.zero_()
        if any(p.uses_second for p in self.parameters):
            # New memory in place of zeros, so that what a rare large partial touched is given back.
            self.high = untouched_zeros((self.buffer.numel,), device=self.low.device)
            for p in self.parameters:
                p.sums.high = self.high[p.start : p.end].view(p.parameter.shape)
        for p in self.parameters:
            p.sums.unit, p.sums.split = p.grid.unit(p.largest), p.grid.split_of(p.largest)
            p.partials, p.foreign = 0, False
        self.peaks.zero_()
        self.seen = Seen()
        self.adding = True

    def to_fp32(self) -> None:
        """Every sum becomes its fp32 number, in place; the integers are gone."""
        at = 0
        gaps = []
        for p in self.parameters:
            second = p.sums.high if p.uses_second else None
            # Ascending: a number is written at or before the place where its integer, and all later ones, are read.
            out = self.buffer.grad_data[p.start : p.end]
            value(self.low[p.start : p.end], None if second is None else second.view(-1), p.sums.unit, p.sums.split, out)
            gaps.append((at, p.start))
            at = p.end
        for lo, hi in (*gaps, (at, self.buffer.numel)):
            self.buffer.grad_data[lo:hi].zero_()
        self.adding = False


def _grid_of(parameter: Any, name: str) -> Grid:
    """Both copies of a tied embedding have one grid."""
    if parameter.dim() == 1:
        return TERMS
    return ROWS if "word_embeddings" in name or getattr(parameter, "shared_embedding", False) else PRODUCTS


@dataclass(frozen=True)
class Works:
    """Collectives in flight, as one handle."""

    works: Sequence[Any]

    def wait(self) -> None:
        """Until all are done."""
        for work in self.works:
            work.wait()

    def __iter__(self) -> Iterator[Any]:
        # MindSpeed's finish_grad_sync waits for a list of handles.
        return iter(self.works)


def reduce_bucket(bucket: Any, group: Any, *, scatter: bool, wait: bool) -> list[Any]:
    """Adds a bucket's integers over ``group``: everywhere, or with ``scatter`` each rank's equal shard on that rank."""
    if group.size() == 1:
        return []
    low = bucket.tio_low
    if scatter:
        shard = low.view(group.size(), -1)[group.rank()]
        work = dist.reduce_scatter_single(shard, low, group=group, async_op=True)
    else:
        work = dist.all_reduce(low, group=group, async_op=True)
    if wait:
        work.wait()
    return [work]


def sums_of(model: Iterable[Any]) -> Iterator[BufferSums]:
    """The sums of all buffers of a model's chunks; chunks without (not wrapped, or outside ``apply()``) have none."""
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers if isinstance(chunk, DistributedDataParallel) else []:
            if hasattr(buffer, "tio_sums"):
                yield buffer.tio_sums


def add_parts(parameters: Sequence[BufferPart], group: Any, *, second: bool = False) -> None:
    """Adds the integers of these parameters over ``group``."""
    add_over([p.sums.high if second else p.sums.low for p in parameters], group)


def settle(model: Sequence[Any], tied: BufferPart | None, groups: Groups) -> None:
    """After all ranks' integers are added: agree on the largest partials, add the second integers where used, and make fp32 of all.

    Args:
        model: the chunks of this rank.
        tied: the embedding shared by the first and the last pipeline stage, where this rank holds a copy.
        groups: which ranks share what.

    Raises:
        ValueError: on all ranks of the world, when a loss function returned no count of tokens, or the whole batch has none.
        RuntimeError: on all ranks, when a gradient came from a layer that is not ours.
        BadGradient: on all ranks, when any partial is NaN, infinite or too large, or there are too many.
    """
    buffers = list(sums_of(model))
    everything = [p for sums in buffers for p in sums.parameters]
    for sums in buffers:
        expert = sums.buffer.tio_expert
        for group in (sums.buffer.data_parallel_group, groups.expert_tensor if expert else groups.tensor):
            if group is not None and group.size() > 1:
                dist.all_reduce(sums.peaks, op=dist.ReduceOp.MAX, group=group)
    if tied is not None:
        dist.all_reduce(tied.sums.peak, op=dist.ReduceOp.MAX, group=groups.embedding)
    refuse_bad_step([p.name for p in everything if p.foreign], list(_bad(everything, groups)), [sums.seen for sums in buffers])
    for sums in buffers:
        second = [p for p in sums.parameters if p.uses_second]
        add_parts(second, sums.buffer.data_parallel_group, second=True)
        add_parts([p for p in second if groups.sums_over_tensor(p)], groups.tensor, second=True)
    if tied is not None and tied.uses_second:
        add_parts([tied], groups.embedding, second=True)
    for sums in buffers:
        sums.to_fp32()
    for p in everything:
        p.largest = p.grid.remember(p.largest, float(p.sums.peak))


def _bad(parameters: Sequence[BufferPart], groups: Groups) -> Iterator[str]:
    for p in parameters:
        home = p.home()
        assert home is not None
        ranks = home.buffer.data_parallel_group.size() * (groups.tensor.size() if groups.sums_over_tensor(p) else 1)
        line = p.problem(ranks)
        if line is not None:
            yield line


@dataclass(frozen=True)
class Groups:
    """The process groups of a model, and whether its norms and routers see slices of the tokens."""

    tensor: Any
    expert_tensor: Any
    embedding: Any
    sequence_parallel: bool
    qk_norm: bool

    def sums_over_tensor(self, p: ParameterSum) -> bool:
        """Whether the ranks of tensor parallelism hold parts of this sum: slices of the tokens, or heads."""
        heads = self.qk_norm and ("q_layernorm" in p.name or "k_layernorm" in p.name)
        return heads or self.sequence_parallel and bool(getattr(p.parameter, "sequence_parallel", False))

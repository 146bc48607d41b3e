"""A MoE layer beside tensor parallelism: which ranks hold the same tokens, how they share them out, and whose gradients are copies.

Ranks of a tensor-parallel group ("peers") have the same micro-batch. DeepSpeed knows two ways, by ``enable_expert_tensor_parallelism`` of the layer:

* true: experts are cut by AutoTP like other linears, or are whole on every peer. An expert-parallel group holds no peers: each sends all its tokens.
* false: experts are whole, and expert-parallel groups are runs of the world, so they hold peers. Each of these sends a share of the tokens, a run of
  them, and shares lie beside each other where they arrive: an expert has the rows of one micro-batch in the order of one process. With ``ep_size`` 1
  every peer has every expert and keeps all tokens; stock shares them out there too, which would cut an expert's micro-batch in two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, autograd, nn

from tio_megatron.collectives import all_gather
from tio_megatron.integrations.deepspeed.sums import Place

PEERS = "tio_peers"
"""Attribute of a ``MOELayer``: the group of those that share its tokens out, or ``None``."""


class Shares:
    """``rows`` of one micro-batch, which all ranks of ``peers`` have; each takes a run of them. No group: one share."""

    def __init__(self, rows: int, peers: Any) -> None:
        self.peers, ranks = peers, 1 if peers is None else peers.size()
        at = 0 if peers is None else peers.rank()
        edges = [rows * one // ranks for one in range(ranks + 1)]
        self.sizes = [end - start for start, end in zip(edges, edges[1:], strict=False)]
        self._start, self._end = edges[at], edges[at + 1]

    def mine(self, rows: Tensor) -> Tensor:
        """[rows, ...] -> this rank's run; the gradient of all runs is put together again."""
        return rows if self.peers is None else _moved(rows, self._cut, self._join)

    def whole(self, run: Tensor) -> Tensor:
        """The inverse. Every peer must have the same gradient of the result, of which each keeps its run."""
        return run if self.peers is None else _moved(run, self._join, self._cut)

    def _cut(self, rows: Tensor) -> Tensor:
        return rows[self._start : self._end]

    def _join(self, run: Tensor) -> Tensor:
        return all_gather(run.contiguous(), self.peers, sizes=self.sizes)


def _moved(rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    out: Tensor = _Move.apply(rows, there, back)
    return out


class _Move(autograd.Function):
    """Bytes move and nothing is added, in either direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(d), None, None


def peers_of(engine: Any) -> Any:
    """Its tensor-parallel group, ``None`` without tensor parallelism. DeepSpeed keeps that of an earlier engine."""
    return engine.mpu.get_tensor_model_parallel_group() if engine.autotp_size() > 1 else None


def adopt_peers(moe: Any, peers: Any) -> None:
    """Tell a ``MoE``'s layer who shares its tokens out; ``peers``: the tensor-parallel group, ``None`` without tensor parallelism."""
    setattr(moe.deepspeed_moe, PEERS, peers if moe.ep_size > 1 and not moe.enable_expert_tensor_parallelism else None)


def expected_ranks(rank: int, world: int, tp: int, ep: int, *, cut: bool) -> tuple[list[int], list[int]]:
    """The ranks of ``rank``'s expert-parallel group and those that hold the same experts; ``cut``: ``enable_expert_tensor_parallelism``.

    >>> expected_ranks(1, 4, 2, 2, cut=True), expected_ranks(1, 4, 2, 2, cut=False)
    (([1, 3], [1]), ([0, 1], [1, 3]))
    """
    line = list(range(rank % tp, world, tp)) if cut else list(range(world))
    at = line.index(rank)
    return line[at - at % ep : at - at % ep + ep], line[at % ep :: ep]


def check_groups(model: nn.Module, tp: int) -> None:
    """DeepSpeed keeps groups by ``ep_size`` alone, so those of an earlier layer or engine of the other kind would be taken.

    Raises:
        ValueError: a layer has groups of other ranks than it needs.
    """
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    for name, module in model.named_modules():
        if isinstance(module, MoE):
            cut, group = module.enable_expert_tensor_parallelism, module.expert_group_name
            ours = expected_ranks(dist.get_rank(), dist.get_world_size(), tp, module.ep_size, cut=cut)
            theirs = list(groups._get_expert_parallel_group_ranks(group)), list(groups._get_expert_data_parallel_group_ranks(group))
            if theirs != ours:
                raise ValueError(
                    f"{name or 'MoE'}: enable_expert_tensor_parallelism={cut} needs the expert-parallel ranks {ours[0]} and the copies {ours[1]}, and "
                    f"DeepSpeed took {theirs[0]} and {theirs[1]}, made for a layer where it is {not cut}, or for another tensor parallel size; the same in "
                    "all layers would work, and a new process for another engine"
                )


def check_save(engine: Any) -> None:
    """Refuse a checkpoint that DeepSpeed would write in part.

    Raises:
        ValueError: whole experts, all of them on every rank: the first rank alone writes, its own shards of the other layers.
    """
    from deepspeed.moe.layer import MoE

    if peers_of(engine) is None:
        return
    for name, module in engine.module.named_modules():
        if isinstance(module, MoE) and module.ep_size == 1 and not module.enable_expert_tensor_parallelism:
            raise ValueError(
                f"save_checkpoint with {name or 'MoE'}: ep_size=1 and enable_expert_tensor_parallelism=False under tensor parallelism: DeepSpeed writes the "
                "layers that are cut from one rank alone, and cannot load them; enable_expert_tensor_parallelism=True would work, or ep_size of the tensor "
                "parallel size"
            )


def places_of_experts(engine: Any) -> dict[int, Place]:
    """Who shares the sum of each expert's parameter, by ``id``."""
    from deepspeed.moe.layer import MoE

    peers, found = peers_of(engine), {}
    for module in engine.module.modules():
        if isinstance(module, MoE):
            same = engine.expert_data_parallel_group[module.expert_group_name]
            for parameter in module.deepspeed_moe.experts.parameters():
                found[id(parameter)] = _place(parameter, module, engine.seq_data_parallel_group, same, peers)
    return found


def _place(parameter: Any, moe: Any, data: Any, same: Any, peers: Any) -> Place:
    if peers is None:
        return Place(same)
    if not moe.enable_expert_tensor_parallelism:
        # With one expert-parallel rank peers have the same experts and the same rows: they add nothing to each other, but ZeRO cuts over all of them.
        return Place(same) if moe.ep_size > 1 else Place(data, held=same)
    if getattr(parameter, "tensor_model_parallel", False):
        return Place(same, shards=peers)
    return Place(same, copied=dist.get_rank(peers) > 0)

"""What a contract costs before any card is used: bytes between ranks beside the stock packages', memory, operators per layer.

Bytes are payload that one rank sends. Stock is taken as people run it: activations and their sums travel in bf16 by ring algorithms, gradients are
reduced in fp32 (``grad_reduce_in_fp32``). Ours: partial sums travel in fp32 by the schedules of :mod:`tio_megatron.collectives`, finished ones in
bf16, gradients as 64-bit integers (docs/contract.md, section 6). What moves without being added is the same on both sides and left out.

Legend: ``T`` tokens of one micro-batch, ``H`` hidden, ``P`` ranks of a group, ``k`` experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tio_megatron.collectives import bytes_sent
from tio_megatron.contract import Contract, Layout, ModelShape, ReductionTree
from tio_megatron.models import Block, Shard, architecture_of, moe_layers
from tio_megatron.models import parameters as table_of
from tio_megatron.verify import end_costs
from tio_megatron.verify.cost import ACTIVATION, PARTIAL, SUM64, Cost

INSIDE = {"add", "scaling", "top_k"}
"""Operations that are part of another operator: a residual sum of the norm that follows, a choice of the router, weights of the sum over experts."""


def training(contract: Contract, model: ModelShape, layout: Layout, tokens: int, dispatcher: str = "alltoall") -> list[Cost]:
    """Of one layer's forward and backward over a micro-batch of ``tokens``, of the model's two ends, and of the gradients of one step.

    Args:
        contract: as both sides will load it.
        model: sizes.
        layout: the trainer's.
        tokens: ``T``, whole sequences of one micro-batch (before sequence or context parallelism cut them).
        dispatcher: ``alltoall`` or ``allgather``.

    Raises:
        ValueError: the contract does not hold for this layout.
    """
    contract.check(layout, model)
    rows = [*_sums(model, layout, tokens // layout.cp, backward=True)]
    if model.experts and layout.expert_tp > 1:
        rows += _inside_experts(model, layout, tokens // layout.cp)
    if model.experts and dispatcher == "allgather" and layout.ep > 1:
        rows += _expert_nodes(model, layout, tokens // layout.cp)
    rows += end_costs.training(contract, model, layout, tokens // layout.cp)
    for name, replicas, count in _replicated(model, layout):
        if replicas > 1:
            moved = 2 * (replicas - 1) * count // replicas
            rows.append(
                Cost(f"reduction of {name} gradients over {replicas} replicas", "step", moved * SUM64, moved * PARTIAL, "exact 64-bit sums for fp32 ones")
            )
    return rows


def rollout(contract: Contract, model: ModelShape, layout: Layout, tokens: int) -> list[Cost]:
    """Of one layer's forward over ``tokens`` tokens of a step (decode: one for each running request), and of the model's two ends.

    Args and errors as :func:`training`.
    """
    contract.check(layout, model, serving=True)
    rows = [*_sums(model, layout, tokens, backward=False)]
    if model.experts and layout.tp > 1:
        stock = 2 * (layout.tp - 1) * tokens * model.hidden * ACTIVATION // layout.tp
        if layout.ep > 1:
            nodes = _most_nodes(model, layout)
            ours = nodes * bytes_sent(layout.tp, tokens * model.hidden, out_dtype=torch.float32)
            rows.append(Cost("sum of experts over ranks", "layer", ours, stock, "partial sums in fp32"))
        else:
            ours = bytes_sent(layout.tp, tokens * model.top_k * model.hidden, out_dtype=torch.bfloat16)
            why = f"each of a token's {model.top_k} expert rows is completed before it is rounded and weighted; --enable-expert-parallel avoids it"
            rows.append(Cost("sums inside experts over ranks", "layer", ours, stock, why))
    return [*rows, *end_costs.rollout(model, layout, tokens)]


@dataclass(frozen=True)
class Total:
    """Bytes that one rank sends in a step (trainer: of the optimizer; rollout: of decoding), beside stock's, and spread over the step's tokens."""

    ours: int
    stock: int
    tokens: int

    @property
    def extra(self) -> int:
        """Bytes more than stock's in a step."""
        return self.ours - self.stock

    @property
    def extra_per_token(self) -> float:
        """The same for one token of the step's."""
        return self.extra / self.tokens


def total(rows: Sequence[Cost], model: ModelShape, layout: Layout, tokens: int, micro_batches: int = 1) -> Total:
    """All layers of one rank's pipeline stage over a step, and the ends: both without pipeline stages, else those of the first or of the last stage,
    whichever sends more.

    Args:
        rows: of :func:`training` or :func:`rollout`, both of ``tokens`` tokens.
        model: sizes.
        layout: as given there.
        tokens: of one micro-batch, or of one decoding step.
        micro_batches: in a step, of one data-parallel rank.
    """
    layers = -(-model.layers // layout.pp)
    ends = {stage: sum(row.ours for row in rows if row.per == stage) for stage in ("first stage", "last stage")}
    busier = max(ends, key=lambda stage: ends[stage])
    times = {"layer": layers * micro_batches, "step": 1, "rank": 0} | {stage: micro_batches * (layout.pp == 1 or stage == busier) for stage in ends}
    return Total(sum(row.ours * times[row.per] for row in rows), sum(row.stock * times[row.per] for row in rows), tokens * micro_batches)


def memory(model: ModelShape, layout: Layout) -> list[Cost]:
    """What stays allocated on one trainer rank."""
    count = sum(parameters(model, layout))
    return [Cost("gradient buffer", "rank", count * SUM64, count * PARTIAL, "a 64-bit sum for each fp32 gradient")]


def operators(model: ModelShape, layout: Layout, *, serving: bool = False) -> tuple[int, int]:
    """Operators of ours, and sums between ranks, in one layer's forward pass (``serving``: the rollout's, where no token travels)."""
    count = sums = 0
    for block in _layer(model):
        computed = {operation.point for operation in block.operations if operation.op not in INSIDE and not operation.weight}
        for parameter in block.parameters:
            points = [tensor.point for tensor in parameter.tensors]
            computed -= {*points[1:]}  # the tensors of one parameter are one product
            if parameter.shard is Shard.ROW:
                sums += (layout.expert_tp if parameter.of_experts and not serving else layout.tp) > 1
        count += len(computed)
    return count, sums


def parameters(model: ModelShape, layout: Layout) -> tuple[int, int]:
    """Parameters on the fullest rank: dense ones (with router, norms, embedding and head), and those of experts."""
    dense = experts = ends = vocabulary = 0
    for spec in (spec for placed in table_of(replace(model, layers=1)) for spec in placed.specs):
        held = spec.numel if spec.axis is None else spec.numel // (layout.tp if spec.expert is None else layout.expert_tp)
        if spec.expert is not None:
            experts += held
        elif spec.layer is not None:
            dense += held
        elif spec.shard is Shard.VOCAB and layout.pp > 1:
            vocabulary = held  # a stage has the embedding or the head
        else:
            ends += held
    layers = -(-model.layers // layout.pp)
    return layers * dense + ends + vocabulary, layers * experts // layout.ep


def _layer(model: ModelShape) -> tuple[Block, Block]:
    return architecture_of(model).layer(moe_layers(model)[0])


def _replicated(model: ModelShape, layout: Layout) -> Iterator[tuple[str, int, int]]:
    """Kind of parameter, replicas over which its gradients are reduced, parameters on a rank."""
    dense, experts = parameters(model, layout)
    replicas = layout.dp * layout.cp
    yield "dense", replicas, dense
    if experts:
        yield "expert", replicas * layout.tp // (layout.ep * layout.expert_tp), experts


def _sums(model: ModelShape, layout: Layout, tokens: int, *, backward: bool) -> Iterator[Cost]:
    """Row-parallel products forward, column-parallel ones backward: of an MoE layer under TP the attention's, of a dense one the MLP's too."""
    if layout.tp == 1:
        return
    size = tokens * model.hidden
    gather = 0 if not layout.sp else (layout.tp - 1) * size * ACTIVATION // layout.tp
    stock = 2 * (layout.tp - 1) * size * ACTIVATION // layout.tp  # a ring's all-reduce, or reduce-scatter and the gather that follows it
    ours = bytes_sent(layout.tp, size, out_dtype=torch.bfloat16, scattered=layout.sp) + gather
    cut = [each for block in _layer(model) for each in block.parameters if not each.of_experts]
    names = [each.label for each in cut if each.shard is Shard.ROW]
    names += [f"input gradient of {each.label}" for each in cut if each.shard is Shard.COLUMN and backward]
    for name in names:
        yield Cost(f"sum of {name} over tensor-parallel ranks", "layer", ours, stock, "partial sums in fp32")


def _inside_experts(model: ModelShape, layout: Layout, tokens: int) -> Iterator[Cost]:
    """Down-projections cut over the expert-tensor-parallel group, forward, and input gradients backward; rows spread evenly over experts."""
    etp = layout.expert_tp
    own = tokens // layout.tp if layout.sp else tokens
    rows = etp * own * model.top_k
    ours = bytes_sent(etp, rows * model.hidden, out_dtype=torch.bfloat16)
    stock = (etp - 1) * rows * model.hidden * ACTIVATION // etp
    why = "partial sums in fp32, and every rank gets the whole row"
    yield Cost("sums inside experts over their tensor-parallel ranks", "layer", ours, stock, why)
    yield Cost("the same, input gradients", "layer", ours, stock, why)


def _expert_nodes(model: ModelShape, layout: Layout, tokens: int) -> Iterator[Cost]:
    """The all-gather dispatcher's sums at the tokens' owners, forward and (dispatch's gradient) backward."""
    share = (layout.ep - 1) * (tokens // layout.tp if layout.sp else tokens) * model.hidden
    nodes = _most_nodes(model, layout)
    why = "partial sums in fp32" + (f", {nodes} nodes of the expert tree a rank" if nodes > 1 else "")
    for name in ("sum of experts at a token's owner", "the same, backward"):
        yield Cost(name, "layer", nodes * share * PARTIAL, share * ACTIVATION, why)


def _most_nodes(model: ModelShape, layout: Layout) -> int:
    run = model.experts // layout.ep
    return max(len(ReductionTree(model.experts).frontier(rank * run, (rank + 1) * run)) for rank in range(layout.ep))

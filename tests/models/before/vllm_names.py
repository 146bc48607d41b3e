"""The model's weights as whole HF tensors: what digests are taken of and a checkpoint holds, whatever this engine's layout.

Every rank of the tensor-parallel group walks the same tensors in the same order, since a cut tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed import get_tp_group

from tio_megatron.checkpoint import tensor_table


def whole_tensors(model: Any, names: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every HF name of ``names`` (all by default) with its whole tensor on one rank of the group and ``None`` on the others.

    A cut or repeated tensor is whole on the group's first rank; an expert that is not cut, on the rank that holds it.

    Raises:
        ValueError: a name is none of the model's.
    """
    table = tensor_table(model.shape)
    unknown = sorted((names or set()) - table.keys())
    if unknown:
        raise ValueError(f"the model has no tensor {', '.join(unknown[:5])}{' ...' if len(unknown) > 5 else ''}")
    wanted = table.keys() if names is None else names
    yield from _walk(model, wanted)


def _walk(model: Any, wanted: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    body = model.model
    embed, head = body.embed_tokens, model.lm_head
    if "model.embed_tokens.weight" in wanted:
        yield "model.embed_tokens.weight", _gather_vocabulary(embed, embed.rows())
    for number, layer in enumerate(body.layers):
        prefix = f"model.layers.{number}."
        parts = (_norms(layer), _attention(layer.self_attn, prefix, wanted), _mlp(layer.mlp, prefix, wanted))
        for part in parts:
            for name, tensor in part:
                if prefix + name in wanted:
                    yield prefix + name, tensor
    if "model.norm.weight" in wanted:
        yield "model.norm.weight", _first(body.norm.weight.data)
    if "lm_head.weight" in wanted:
        yield "lm_head.weight", _gather_vocabulary(head, head.packed.unpack())


def _norms(layer: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", _first(getattr(layer, name).weight.data)
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", _first(getattr(layer.self_attn, name).weight.data)


def _attention(attention: Any, prefix: str, wanted: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    heads = ("q_proj", "k_proj", "v_proj")
    if any(f"{prefix}self_attn.{name}.weight" in wanted for name in heads):
        cut = attention.qkv_proj.packed.unpack().split([attention.q_size, attention.kv_size, attention.kv_size])
        copies = attention.qkv_proj.num_kv_head_replicas
        for name, shard, step in zip(heads, cut, (1, copies, copies), strict=True):
            yield f"self_attn.{name}.weight", _gather(shard, 0, step)
    if f"{prefix}self_attn.o_proj.weight" in wanted:
        yield "self_attn.o_proj.weight", _gather(attention.o_proj.packed.unpack(), 1)


def _mlp(mlp: Any, prefix: str, wanted: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    if hasattr(mlp, "experts"):
        if f"{prefix}mlp.gate.weight" in wanted:
            yield "mlp.gate.weight", _first(mlp.gate.packed.unpack())
        yield from _experts(mlp.experts.routed_experts, prefix, wanted)
        return
    if any(f"{prefix}mlp.{name}.weight" in wanted for name in ("gate_proj", "up_proj")):
        for name, shard in zip(("gate_proj", "up_proj"), mlp.gate_up_proj.packed.unpack().chunk(2), strict=True):
            yield f"mlp.{name}.weight", _gather(shard, 0)
    if f"{prefix}mlp.down_proj.weight" in wanted:
        yield "mlp.down_proj.weight", _gather(mlp.down_proj.packed.unpack(), 1)


def _experts(experts: Any, prefix: str, wanted: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    prefix = f"{prefix}mlp.experts."
    if not any(name.startswith(prefix) for name in wanted):
        return
    gate_up, down = experts.w13.unpack(), experts.w2.unpack()
    (lo, hi), cut = experts.span, experts.etp_group is not None
    for number in range(experts.global_num_experts):
        here = lo <= number < hi
        for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            shard = None
            if here:
                local = number - lo
                shard = down[local] if name == "down_proj" else gate_up[local].chunk(2)[name == "up_proj"]
            whole = _gather(shard, axis) if cut and shard is not None else shard
            # Experts that nobody cuts and nobody shares out are on every rank of no group: one rank, whole.
            yield f"mlp.experts.{number}.{name}.weight", whole


def _first(tensor: torch.Tensor) -> torch.Tensor | None:
    """A repeated tensor, on the first rank only."""
    return tensor if get_tp_group().rank_in_group == 0 else None


def _gather(shard: torch.Tensor, axis: int, step: int = 1) -> torch.Tensor | None:
    """The shards of every ``step``-th rank side by side, on the group's first rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return shard
    shards = _gather_bytes(shard.contiguous(), group)
    return None if shards is None else torch.cat(shards[::step], dim=axis)


def _gather_vocabulary(layer: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """The true rows of every rank, on the group's first rank."""
    whole = _gather(rows, 0)
    return None if whole is None else whole[: layer.org_vocab_size]


def _gather_bytes(tensor: torch.Tensor, group: Any) -> list[torch.Tensor] | None:
    flat = tensor.reshape(-1).view(torch.uint8)
    first = group.rank_in_group == 0
    parts = [torch.empty_like(flat) for _ in range(group.world_size)] if first else None
    torch.distributed.gather(flat, parts, dst=group.ranks[0], group=group.device_group)
    return None if parts is None else [part.view(tensor.dtype).view(tensor.shape) for part in parts]

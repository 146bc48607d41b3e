"""``MOELayer.forward``: gate, dispatch, experts and combine in the contract's order. The capacity buffers of stock are gone; every token is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tio_megatron.integrations.deepspeed.experts import run_experts
from tio_megatron.integrations.deepspeed.peers import PEERS, Shares
from tio_megatron.integrations.deepspeed.state import ordered
from tio_megatron.layers.dispatch import AllToAll, ExpertGroups
from tio_megatron.layers.grains import rank, size
from tio_megatron.layers.router import route_tokens, router_logits


def run(layer: Any, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
    """``hidden`` [..., M] of one micro-batch -> the same shape; leaves ``l_aux`` and ``exp_counts`` on the layer, as stock does.

    Raises:
        ValueError: ``used_token`` where stock would ignore it (k > 1), or with values other than 0 and 1.
    """
    gate, x = layer.gate, hidden.reshape(-1, hidden.shape[-1])
    experts = gate.wg.weight.shape[0]
    logits = router_logits(x.unsqueeze(1), gate.wg.weight)
    padding = _padding(used_token, gate.k, len(x))
    # Stock keeps the probability of a single choice and makes those of several sum to one.
    ids, probs = route_tokens(logits, gate.k, normalise=gate.k > 1, padding=padding)
    layer.exp_counts = torch.bincount(ids[ids >= 0], minlength=experts)
    layer.l_aux = balance(logits, ids, gate.k)
    group = layer.ep_group if layer.ep_size > 1 else None
    peers = getattr(layer, PEERS)
    shares = Shares(len(x), peers)
    ids, probs, x = shares.mine(ids), shares.mine(probs), shares.mine(x)
    way = AllToAll(ids, ExpertGroups(experts, ep=group, all=group))
    rows = way.dispatch(way.spread(x))
    # Peers are neighbours in the group, and their shares are of one micro-batch.
    micro_batches, mine = size(group) // size(peers), rank(group) // size(peers)
    sources = way.label(torch.full((len(x),), mine, dtype=torch.int64, device=x.device))
    local = torch.arange(layer.num_local_experts, device=x.device).repeat_interleave(way.counts)
    counts = torch.bincount(local * micro_batches + sources, minlength=layer.num_local_experts * micro_batches)
    done = run_experts(layer.experts.deepspeed_experts, rows, counts.view(layer.num_local_experts, micro_batches))
    return shares.whole(way.combine(way.collect(done), probs)).view(hidden.shape)


moe_forward = ordered(run)


def balance(logits: Tensor, ids: Tensor, k: int) -> Tensor:
    """Stock's ``l_aux`` of one micro-batch, fp32: no other micro-batch is in it, so torch's order of it depends on no layout.

    Its formulas: for k = 1 and 2 only the first choice counts (``top1gating``, ``top2gating``), for more all do (``topkgating``).

    Args:
        logits: [T, E] fp32.
        ids: [T, k], ascending; -1 for a token that is padding.
    """
    gates = torch.softmax(logits, dim=1)
    experts = logits.shape[1]
    chosen = ids if k > 2 else gates.argmax(dim=1, keepdim=True).masked_fill(ids[:, :1] < 0, -1)
    mask = torch.zeros(len(ids), experts + 1, device=logits.device).scatter_(1, chosen.remainder(experts + 1), 1.0)[:, :experts]
    me, ce = gates.mean(dim=0), mask.mean(dim=0)
    return (me * ce).sum() * experts if k == 1 else (me * ce).mean() * experts * experts / max(1, k if k > 2 else 1)


def _padding(used_token: Tensor | None, k: int, tokens: int) -> Tensor | None:
    if used_token is None:
        return None
    if k > 1:
        raise ValueError(f"MoE: used_token with k={k} is ignored by DeepSpeed, so padding would be routed; k=1 would work, or no used_token")
    flat = used_token.reshape(-1)
    if len(flat) != tokens or not bool(((flat == 0) | (flat == 1)).all()):
        raise ValueError(f"MoE: used_token must hold 0 or 1 for each of the {tokens} tokens, got {len(flat)} values")
    return flat == 0

"""What every recorder does alike: sizes of the model, log-probabilities from logits, experts in ascending order, which tensors are kept.

Legend: n tokens of a pass, V true vocabulary, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tio_megatron.contract import ModelShape
from tio_megatron.models import moe_layers
from tio_megatron.traces.tracer import Tracer


def keeper(keep: Sequence[str] | bool) -> Callable[[str], bool]:
    """From ``--keep``: names of points or parameters, or parts of them; "all", True or False."""
    if isinstance(keep, bool):
        return lambda name: bool(keep)
    wanted = [word for word in keep if word]
    return lambda name: any(word == "all" or word == name or f".{name}.".find(f".{word}.") >= 0 or name.startswith(f"{word}.") for word in wanted)


def shape_of(sizes: ModelShape) -> dict[str, Any]:
    """The ``shape`` of a trace of a described model."""
    return {
        "architecture": sizes.architecture,
        "layers": sizes.layers,
        "moe": moe_layers(sizes),
        "tied": sizes.tied,
        "hidden": sizes.hidden,
        "head_dim": sizes.head_dim,
        "experts": sizes.experts or None,
        "top_k": sizes.top_k or None,
    }


def record_head(tracer: Tracer, logits: torch.Tensor, targets: torch.Tensor, *, temperature: float, full_vocab: bool) -> None:
    """The last points from ``logits`` [n, V] and the next tokens ``targets`` [n] (-1 for none): log-softmax in fp32, a temperature first."""
    tracer.point("logits", logits)
    table = (logits.to(torch.float32) / temperature).log_softmax(-1)
    if full_vocab:
        tracer.point("logprob_rows", table)
    chosen = table.gather(1, targets.clamp_min(0)[:, None].to(table.device))[:, 0]
    tracer.point("logprob", chosen.masked_fill((targets < 0).to(table.device), 0.0))


def in_id_order(ids: torch.Tensor, *along: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Expert ids [n, K] ascending, and other tensors [n, K, ...] brought along."""
    order = ids.argsort(dim=-1, stable=True)
    moved = [x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand_as(x)) for x in along]
    return (ids.gather(1, order), *moved)

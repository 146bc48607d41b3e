"""Wrong orders planted in the workers on purpose: each must be seen by the equality test that runs beside it."""

from __future__ import annotations

from typing import Any

import torch

from tio_megatron.integrations.vllm import layers
from tio_megatron.integrations.vllm.worker import WorkerExtension
from tio_megatron.layers import experts, experts_replicated


def rounded_per_rank(partial: torch.Tensor, group: Any, *, out_dtype: torch.dtype) -> torch.Tensor:
    """What stock does: each rank rounds its partial sum, the sum is rounded again."""
    total = partial.to(out_dtype)
    torch.distributed.all_reduce(total, group=group)
    return total


def one_rank_after_another(partial: torch.Tensor, group: Any, *, out_dtype: torch.dtype) -> torch.Tensor:
    """A ring's order. Two ranks cannot tell it from the tree."""
    parts = [torch.empty_like(partial) for _ in range(group.size())]
    torch.distributed.all_gather(parts, partial.contiguous(), group=group)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(out_dtype)


def experts_one_after_another(
    rows: torch.Tensor, index: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, *, experts: int, lo: int, hi: int
) -> torch.Tensor:
    """Chosen experts added by ascending id within the rank; one node, so every rank must hold an aligned run."""
    total = torch.full((index.shape[0], rows.shape[1]), -0.0)
    for choice in range(index.shape[1]):
        here = index[:, choice] >= 0
        total[here] = total[here] + rows[index[here, choice]].float() * probs[here, choice, None]
    return total[None]


class Planted:
    """A worker extension beside our worker class."""

    def tio_plant(self, what: str | None) -> None:
        """Plant one wrong order, or take all of them out."""
        saved = self.__dict__.setdefault("_planted", [])
        while saved:
            owner, name, value = saved.pop()
            setattr(owner, name, value)
        places: dict[str, list[tuple[Any, str, Any]]] = {
            "rounded": [(layers, "all_reduce", rounded_per_rank), (experts, "all_reduce", rounded_per_rank)],
            "ring": [(layers, "all_reduce", one_rank_after_another), (experts, "all_reduce", one_rank_after_another)],
            "experts": [(experts_replicated, "expert_nodes", experts_one_after_another)],
        }
        for owner, name, value in places[what] if what else []:
            saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)


class PlantedExtension(Planted, WorkerExtension):
    """The same beside stock's worker class, for engines switched on by the environment."""

"""Two training steps of a tiny model on two ranks, as digests; with and without MindSpeed in the process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_megatron
import torch

from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron.applied import state
from tio_megatron.testing.ranks import run_ranks

LAYOUT = Layout(dp=2)


def digests(folder: Path, *, layout: Layout = LAYOUT, ordered: bool = True, before: Callable[[], Any] | None = None) -> dict[str, str]:
    """Digests of the losses and of the weights after two steps; the same on both ranks.

    Args:
        folder: a HF folder.
        layout: of two ranks.
        ordered: under the contract, else stock's parts.
        before: called on each rank when the contract is in force and nothing is built yet: what a worker does there (``repatch``).
    """
    fields = {} if ordered else {"gradient_accumulation_fusion": False}
    setup = tiny_megatron.Setup(folder, layout, ordered=ordered, padding=0.0, fields=fields)
    return run_ranks(2, lambda rank: _rank(rank, setup, before), timeout=240.0)[0]


def _rank(rank: int, setup: tiny_megatron.Setup, before: Callable[[], Any] | None) -> dict[str, str]:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tio_megatron.checkpoint import Checkpoint
    from tio_megatron.integrations.megatron import cpu_device
    from tio_megatron.integrations.megatron.weights.transfer import export_weights

    # For good: MindSpeed replaces some of the same functions of torch.cuda.
    cpu_device.enable()
    with tiny_megatron.running(setup), Checkpoint(setup.path) as checkpoint:
        if before is not None:
            before()
        if setup.ordered:
            assert state.problems() == [], state.problems()
        model = tiny_megatron.ddp(tiny_megatron.build(setup, checkpoint), overlap_grad_reduce=True, use_distributed_optimizer=True)
        config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=1.0, params_dtype=torch.bfloat16)
        optimizer = get_megatron_optimizer(config, [model])
        found = []
        for step in range(2):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            tokens = torch.randint(0, checkpoint.config.shape.vocab, (2, 25), generator=torch.Generator().manual_seed(10 * step + rank % setup.layout.dp))
            found.append(tiny_megatron.losses(model, [tokens], backward=True, weight=1 / 96))
            optimizer.step()
        # By their HF names: under MindSpeed experts may be grouped, with other names of their own.
        whole = sorted(export_weights(model.module, checkpoint.config, destination=None))
        losses = [None, None]
        torch.distributed.all_gather_object(losses, torch.cat(found))
        return {"losses": _digest(torch.cat(losses)), "weights": _digest(*(weight for _, weight in whole))}


def _digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

"""Megatron's process groups of a layout: made where a lost rank is named, left together with the contract."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tio_megatron.collectives import failure
from tio_megatron.contract import Contract
from tio_megatron.contract.words import TrainerLayout
from tio_megatron.integrations.megatron.applied.apply import undo


def make_groups(layout: TrainerLayout, seed: int) -> None:
    """Make the groups of ``layout`` over the whole world and seed Megatron's random states. Every rank calls it.

    Raises:
        CollectiveError: a rank is missing; names it.
    """
    sizes = layout.layout
    with failure.Call(f"making the process groups of {layout}", dist.group.WORLD):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            context_parallel_size=sizes.cp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.expert_tp,
            distributed_timeout_minutes=failure.patience() / 60,
        )
    model_parallel_cuda_manual_seed(seed)


def leave_groups(contract: Contract | None) -> None:
    """Leave them, and take the contract back where there is one."""
    parallel_state.destroy_model_parallel()
    if contract is not None:
        undo()

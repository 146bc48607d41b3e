"""megatron-core's groups for a model that is only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from tio_megatron.contract import Layout


@contextmanager
def parallel(layout: Layout) -> Iterator[None]:
    """In this context megatron-core's parallel state is that of ``layout``; torch.distributed must be initialized with its ranks."""
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
    )
    try:
        tensor_parallel.random.model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def forward(model: Any, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """What the model, stock or not, gives for one micro-batch: its output on the last pipeline stage, None on the others. All ranks call it alike.

    Args:
        model: this rank's stage.
        ids: [1, s] int64.
        positions: [1, s] int64.
        mask: as the model wants it.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        out: torch.Tensor = model(ids, positions, mask)
        return out
    found: list[torch.Tensor] = []

    def step(iterator: Iterator[Any], stage: Any) -> tuple[torch.Tensor, Any]:
        next(iterator)

        def done(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            found.append(output)
            return output.new_zeros(())

        return stage(ids, positions, mask), done

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([None]),
        model=[model],
        num_microbatches=1,
        seq_length=ids.shape[1],
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return found[0] if found else None

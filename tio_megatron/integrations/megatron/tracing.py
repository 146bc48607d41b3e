"""megatron-core's groups for a model that is only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core import parallel_state, tensor_parallel

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

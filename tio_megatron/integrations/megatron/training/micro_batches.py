"""Which samples the rows belong to that run through the model right now, for the sums over tokens in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from tio_megatron.integrations.megatron.applied import state
from tio_megatron.layers.grains import MicroBatch
from tio_megatron.layers.sequences import Sequences

_current: MicroBatch | None = None


def current() -> MicroBatch | None:
    """The micro-batch that entered last; ``None`` before any (an expert layer run on its own)."""
    return _current


def enter(packed_seq_params: Any) -> None:
    """Say which micro-batch runs from now on.

    Every layer says so when it starts: with a pipeline and recomputation a layer of an earlier micro-batch runs after later ones began.

    Args:
        packed_seq_params: stock's, or ``None`` where each column of ``[s, b]`` is a sample. Its micro-batch is kept on it for the other layers.
    """
    global _current
    grain = state.active().grain
    keeper = _Columns if packed_seq_params is None else packed_seq_params
    known = getattr(keeper, "tio_micro_batch", None)
    groups = _groups()
    if known is None or known.grain != grain or (known.context, known.tensor, known.block) != groups:
        known = _make(packed_seq_params, grain, *groups)
        keeper.tio_micro_batch = known
    _current = known


def resume(batch: MicroBatch | None) -> None:
    """The micro-batch that was :func:`current` at another time runs again."""
    global _current
    _current = batch


def leave() -> None:
    """Forget the micro-batch."""
    global _current
    _current = None
    _Columns.tio_micro_batch = None


class _Columns:
    """Keeps the micro-batch of unpacked samples, whose rows follow from the shape alone."""

    tio_micro_batch: MicroBatch | None = None


def _groups() -> tuple[Any, Any, Any]:
    context = parallel_state.get_context_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    block = parallel_state.get_tensor_and_context_parallel_group()
    return context, tensor, block


def _make(packed_seq_params: Any, grain: int, context: Any, tensor: Any, block: Any) -> MicroBatch:
    starts = None if packed_seq_params is None else packed_starts(packed_seq_params)
    return MicroBatch(
        Sequences(starts, context.rank(), context.size()),
        grain,
        replica=parallel_state.get_data_parallel_rank(),
        context=context,
        tensor=tensor,
        block=block,
        experts_over=parallel_state.get_expert_model_parallel_world_size() * parallel_state.get_expert_tensor_parallel_world_size(),
        copies=parallel_state.get_expert_data_parallel_group(),
        padded=starts is not None and not torch.equal(starts, packed_seq_params.cu_seqlens_q),
    )


def packed_starts(packed_seq_params: Any) -> torch.Tensor:
    """Where packed sequences start.

    Padded starts when given: the padding of a sequence comes last in it, so its true tokens never see it, and sequences stay apart.

    Raises:
        ValueError: another format than thd, different starts for queries and keys, or a context-parallel group of their own.
    """
    if packed_seq_params.qkv_format != "thd":
        raise ValueError(f"packed sequences: qkv_format {packed_seq_params.qkv_format!r} is not supported; 'thd' is")
    if any(getattr(packed_seq_params, name, None) is not None for name in ("local_cp_size", "cp_group")):  # fields since 0.16
        raise ValueError("packed sequences: local_cp_size and cp_group (hybrid context parallelism) are not supported; leave them None")
    starts, keys = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv
    if packed_seq_params.cu_seqlens_q_padded is not None:
        starts, keys = packed_seq_params.cu_seqlens_q_padded, packed_seq_params.cu_seqlens_kv_padded
    if keys is not None and keys is not starts and not torch.equal(starts, keys):
        raise ValueError("packed sequences: queries and keys start at different places; only self-attention over whole sequences is supported")
    return starts

"""Log-probabilities of given tokens from a stock megatron-core model, by its own layers: what people without the plug-in have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel


@torch.no_grad()
def stock_logprobs(model: Any, sequences: Sequence[Sequence[int]], vocab: int) -> list[list[float]]:
    """Score each sequence alone; every rank calls it alike. One pipeline stage, no context parallelism.

    Args:
        model: a ``GPTModel``, possibly wrapped, whose output is cut over tensor-parallel ranks.
        sequences: token ids; they are padded behind to what sequence parallelism and the dispatcher need.
        vocab: true vocabulary; rows behind it are left out.

    Returns:
        For each sequence the log-probability of its second token, its third, ..., as fp32 of fp32 logits.
    """
    found = []
    for sequence in sequences:
        length = -(-len(sequence) // 8) * 8
        ids = torch.tensor([[*sequence, *[0] * (length - len(sequence))]])
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu_(1)
        logits = model(ids, torch.arange(length).unsqueeze(0), mask)
        rows = tensor_parallel.gather_from_tensor_model_parallel_region(logits)[0, : len(sequence) - 1, :vocab]
        table = rows.float().log_softmax(-1)
        found.append(table.gather(1, torch.tensor(list(sequence[1:]))[:, None])[:, 0].tolist())
    return found

"""Which parameters are cut over ranks and which are copies: what counts each of them once in the norm of the gradients.

Megatron-core writes ``tensor_model_parallel`` on a weight while it initialises it, so with ``perform_initialization=False`` every weight
looks like a copy, and only the first tensor-parallel rank's shard would be counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from tio_megatron.integrations.megatron.modules.experts import OrderedGroupedMLP


def tag_shards(model: torch.nn.Module) -> None:
    """Write the missing tags of sharded weights. Expert weights count as sharded also where one rank holds all of their width: no rank of
    the group over which their norm is summed has a copy.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            _tag([module.weight], 0)
        elif isinstance(module, RowParallelLinear):
            _tag([module.weight], 1)
        elif isinstance(module, OrderedGroupedMLP):
            _tag(module.linear_fc1.weights(), 0, 2)
            _tag(module.linear_fc2.weights(), 1)


def _tag(weights: Iterable[Any], dim: int, stride: int = 1) -> None:
    for weight in weights:
        # An output layer that uses the embedding's weight has none of its own.
        if weight is not None and not getattr(weight, "tensor_model_parallel", False):
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, stride

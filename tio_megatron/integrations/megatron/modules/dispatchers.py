"""Megatron's two token dispatchers over :mod:`tio_megatron.layers.dispatch`.

The steps keep Megatron's names and order. What a step hands to the next is ours: the router's compact ids and probabilities come in,
probabilities never travel to the experts, and expert outputs are complete (expert-tensor-parallel sum done) when they come back.
State that backward needs lives in the call's :class:`AllToAll` or :class:`AllGather`, never on the dispatcher: several micro-batches with
different token counts are in flight in a pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from tio_megatron.integrations.megatron.training import micro_batches
from tio_megatron.layers.dispatch import AllGather, AllToAll, ExpertGroups
from tio_megatron.layers.experts import RowLabels
from tio_megatron.layers.grains import rank

_NO_PROBS = torch.empty(0)
"""Stands where stock hands probabilities along; ours weights rows after the experts."""


def row_labels(way: AllToAll | AllGather, hidden_shape: torch.Size, slices: int) -> RowLabels | None:
    """Where the rows of the local experts come from; ``None`` where no gradient is wanted.

    Args:
        way: this call's.
        hidden_shape: [s, b, H] of this rank's tokens.
        slices: of sequence parallelism.
    """
    batch = micro_batches.current()
    if batch is None or not torch.is_grad_enabled():
        return None
    length, samples = hidden_shape[0] * slices, hidden_shape[1]
    rows = length, samples, slices, 0 if slices == 1 else rank(batch.tensor)
    own = [batch.labels(*rows), batch.owners(*rows)] if batch.straddles else [batch.labels(*rows)]
    labels, *owners = way.label(torch.stack(own, 1).to(way.ids.device)).unbind(1)
    return RowLabels(labels, batch, *owners)


_Stock: Any = object


class _TwoSteps(_Stock):
    """The six steps as the two that ``MoELayer`` calls up to megatron-core 0.12."""

    def token_permutation(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, RowLabels | None]:
        """From ``dispatch_preprocess`` to ``dispatch_postprocess``."""
        return self.dispatch_postprocess(*self.token_dispatch(*self.dispatch_preprocess(hidden_states, routing_map, probs)))

    def token_unpermutation(self, hidden_states: torch.Tensor, bias: None = None) -> tuple[torch.Tensor, None]:
        """From ``combine_preprocess`` to ``combine_postprocess``."""
        return self.combine_postprocess(self.token_combine(self.combine_preprocess(hidden_states))), None


class OrderedAlltoAllDispatcher(_TwoSteps, MoEAlltoAllTokenDispatcher):
    """The token's owner gets every expert row of its tokens and sums them."""

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden_states`` [s, b, H], ``routing_map`` the ids [T, k], ``probs`` [T, k] -> one row for each choice, sorted by expert."""
        self.hidden_shape = hidden_states.shape
        self.probs = probs
        self.way = AllToAll(routing_map, ExpertGroups(self.config.num_moe_experts, self.ep_group, self.tp_group, self.tp_ep_group))
        return self.way.spread(hidden_states.reshape(-1, self.hidden_shape[-1])), _NO_PROBS

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of own tokens -> rows of the local experts."""
        return self.way.dispatch(hidden_states), probs

    def dispatch_postprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, RowLabels | None]:
        """Rows are sorted by expert already; adds the rows of each local expert, [n] int64, and where each row comes from."""
        slices = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return hidden_states, self.way.counts, row_labels(self.way, self.hidden_shape, slices)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing to do: the expert-tensor-parallel sum is complete."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True) -> torch.Tensor:
        """Rows of the local experts -> rows of own tokens."""
        return self.way.collect(hidden_states)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows of own tokens -> [s, b, H]."""
        out = self.way.combine(hidden_states, self.probs).view(self.hidden_shape)
        del self.way, self.probs
        return out


class OrderedAllGatherDispatcher(_TwoSteps, MoEAllGatherTokenDispatcher):
    """Every rank sums the rows of its experts to nodes of the expert tree; the nodes meet at the token's owner."""

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden_states`` [s, b, H], ``routing_map`` the ids [T, k], ``probs`` [T, k] -> own tokens [T, H]."""
        self.hidden_shape = hidden_states.shape
        self.probs = probs
        self.way = AllGather(routing_map, ExpertGroups(self.config.num_moe_experts, self.ep_group, self.tp_group, self.tp_ep_group))
        return hidden_states.reshape(-1, self.hidden_shape[-1]), _NO_PROBS

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Own tokens -> rows of the local experts."""
        return self.way.dispatch(hidden_states), probs

    def dispatch_postprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, RowLabels | None]:
        """Rows are sorted by expert already; adds the rows of each local expert, [n] int64, and where each row comes from."""
        slices = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return hidden_states, self.way.counts, row_labels(self.way, self.hidden_shape, slices)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing to do: the expert-tensor-parallel sum is complete."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows of the local experts -> sums of own tokens [T, H]."""
        return self.way.combine(hidden_states, self.probs)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [s, b, H]."""
        out = hidden_states.view(self.hidden_shape)
        del self.way, self.probs
        return out


DISPATCHERS = {"alltoall": OrderedAlltoAllDispatcher, "allgather": OrderedAllGatherDispatcher}
"""By the value of ``moe_token_dispatcher_type``."""

"""Megatron's router with our arithmetic."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker
from megatron.core.transformer.moe.router import TopKRouter

from tio_megatron.integrations.megatron import groups
from tio_megatron.integrations.megatron.applied.moe_refusals import balance_coefficient
from tio_megatron.integrations.megatron.training import micro_batches
from tio_megatron.layers.balance import add_balance_loss
from tio_megatron.layers.grains import rank
from tio_megatron.layers.router import route_tokens, router_logits


class OrderedRouter(TopKRouter):
    """``TopKRouter`` with fp32 logits, ties to the lower expert id and one order of every sum.

    The parameter and its name stay stock. The result is compact, and only our dispatchers read it: in place of a dense map and dense
    probabilities, ``ids`` and ``probs`` of the chosen experts.
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (stock's name)
        """``input`` [s, b, H] -> logits [T, E] fp32, with T = s * b."""
        return router_logits(input, self.weight, batch=micro_batches.current(), slices=self._slices())

    def _slices(self) -> int:
        return self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, E] -> probabilities [T, k] fp32 and expert ids [T, k] int64.

        ``moe_router_pre_softmax=False`` (softmax over the chosen logits) is the softmax over all experts with the chosen ones made to sum
        to one, HF's ``norm_topk_prob=True``; ``True`` keeps the chosen probabilities as they are, HF's ``norm_topk_prob=False``.

        Args:
            padding_mask: [s, b] bool, True for padding, as Megatron's own code reads it (one of its docstrings says the opposite).
        """
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        ids, probs = route_tokens(logits, self.topk, normalise=not self.config.moe_router_pre_softmax, padding=padding)
        return probs, ids

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002
        """``input`` [s, b, H], ``padding_mask`` [s, b] -> probabilities [T, k] fp32 and expert ids [T, k] int64.

        Stock cuts the mask for sequence parallelism on the first pipeline stage alone; where it comes whole, this rank's positions are taken.

        Raises:
            ValueError: the mask fits neither this rank's positions nor the whole sequence; or there is an auxiliary loss, and packed samples hold
                padding that no mask tells.
        """
        if padding_mask is not None and padding_mask.shape != input.shape[:2]:
            if not self.config.sequence_parallel or padding_mask.shape != (input.shape[0] * self.tp_group.size(), input.shape[1]):
                raise ValueError(f"router: padding_mask {list(padding_mask.shape)} does not fit hidden states {list(input.shape)}")
            padding_mask = padding_mask.chunk(self.tp_group.size())[self.tp_group.rank()]
        logits = self.gating(input)
        probs, ids = self.routing(logits, padding_mask)
        coefficient = balance_coefficient(self.config)
        # Without gradients this is no training step, or the first pass of a recomputation: the loss counts once.
        if coefficient and self.training and torch.is_grad_enabled():
            probs = self._add_balance_loss(probs, logits, ids, input.shape, padding_mask, coefficient)
        return probs, ids

    def _add_balance_loss(
        self, probs: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, shape: torch.Size, padding_mask: torch.Tensor | None, coefficient: float
    ) -> torch.Tensor:
        """``probs`` that carry the sequence-wise auxiliary loss; its mean over the samples goes to megatron-core's tracker, undivided by ranks."""
        batch = micro_batches.current()
        if batch is None:
            raise ValueError("router: the auxiliary loss is of whole samples, and nothing says which rows are whose; run the layer inside its model")
        slices = self._slices()
        probs, values = add_balance_loss(
            probs,
            logits,
            ids,
            batch=batch,
            length=shape[0] * slices,
            samples=shape[1],
            slices=slices,
            padding=None if padding_mask is None else padding_mask.reshape(-1),
            coefficient=coefficient,
            scale=_main_scale,
        )
        # The tracker adds over these ranks, which all have the value of whole samples.
        seen = values[values != 0] if rank(self.tp_cp_group) == 0 else values[:0]
        mean = seen.mean() if len(seen) else values.new_zeros(())
        save_to_aux_losses_tracker("seq_load_balancing_loss", mean, self.layer_number, self.config.num_layers, reduce_group=self.tp_cp_group)
        return probs


def adopt_router(module: TopKRouter) -> None:
    """Make ``module`` compute as ours, keeping its weight: for releases whose spec names no router."""
    module.__class__ = OrderedRouter
    groups.keep_tensor_group(module)


def _main_scale() -> float:
    """What megatron-core's schedule multiplies the main loss by."""
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return 1.0 if scale is None else float(scale)

"""The trainer's side of a step of GRPO: score what was sampled, then learn from it. The arithmetic is :mod:`tio_megatron.rl`'s.

Legend: ``b`` rows of a micro-batch, ``s`` padded tokens, ``n`` those of this rank (all, without context parallelism); place ``t`` of a row
holds what belongs to the prediction of token ``t + 1``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from examples.qwen3_moe.trainer import Batch, Trainer
from tio_megatron import rl
from tio_megatron.layers.context import all_tokens, own_tokens


@dataclass(frozen=True)
class Samples:
    """What one step sampled: whole sequences, the length of each one's prompt, and for each response token the rollout's log-probability.

    ``rewards``, ``groups`` (the number of its prompt) and ``seeds`` (of its sampling) have one entry per sequence.
    """

    sequences: list[list[int]]
    prompts: list[int]
    logprobs: list[list[float]]
    rewards: list[float]
    groups: list[int]
    seeds: list[int]

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each sequence."""
        return [len(logprobs) for logprobs in self.logprobs]

    def part(self, lo: int, hi: int) -> Samples:
        """The sequences numbered ``lo`` to ``hi``."""
        return Samples(*(getattr(self, each.name)[lo:hi] for each in fields(self)))


@dataclass(frozen=True)
class Learned:
    """One optimizer step: the importance ratio of each response token of each sequence (on rank 0), and the gradients' norm."""

    ratios: list[list[float]]
    grad_norm: float


class PolicyTrainer(Trainer):
    """A :class:`Trainer` that scores and learns at a temperature. Without a contract all of its log-probabilities are stock Megatron's."""

    temperature = 1.0

    def score_policy(self, samples: Samples, *, size: int) -> tuple[list[list[float]], list[list[float]]]:
        """Log-probability and entropy of every response token, with the weights as they are. On rank 0; empty lists elsewhere."""
        self.model.eval()
        logprobs: dict[int, list[float]] = {}
        entropies: dict[int, list[float]] = {}

        def keep(logits: torch.Tensor, part: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
            self._collect(logprobs, samples, part, self._logprob(logits, part))
            self._collect(entropies, samples, part, self._entropy(logits))
            return logits.new_zeros(()), {}

        with torch.no_grad():
            self._schedule(self._training_batches(samples.sequences, None, size), keep, forward_only=True, logits=True)
        return _on_first(logprobs, len(samples.sequences)), _on_first(entropies, len(samples.sequences))

    def learn(self, samples: Samples, advantages: torch.Tensor, *, size: int, clip: float, clip_high: float) -> Learned:
        """One step of Adam on PPO's clipped loss, with the ratio to the probabilities that the rollout sampled with.

        Args:
            samples: of this step of the optimizer, all ranks' together.
            advantages: ``[N]`` fp32, one per sequence.
            size: sequences of a micro-batch.
            clip, clip_high: bounds of the ratio.
        """
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        lengths = torch.tensor(samples.lengths)
        ratios: dict[int, list[float]] = {}

        def loss_of(logits: torch.Tensor, part: Batch) -> tuple[torch.Tensor, ...]:
            sequence, old = (own_tokens(t, self.sequences) for t in _places(samples, part))
            ratio = rl.token_ratio(self._logprob(logits, part), old)
            self._collect(ratios, samples, part, ratio)
            loss = rl.clipped_loss(ratio, rl.spread(advantages, sequence), clip=clip, clip_high=clip_high).loss
            # One weight per token, from the lengths of the whole batch: nothing is divided by micro-batches or ranks afterwards.
            total = rl.weighted_sum(loss, rl.token_weights(sequence, lengths, "seq-mean-token-mean"))
            return total, torch.tensor(sequence.numel(), dtype=torch.int), {}

        self._schedule(self._training_batches(samples.sequences, None, size), loss_of, forward_only=False, logits=True)
        _, norm, _ = self.optimizer.step()
        return Learned(_on_first(ratios, len(samples.sequences)), float(norm or 0.0))

    def _logprob(self, logits: torch.Tensor, part: Batch) -> torch.Tensor:
        """``[b, n]`` fp32, differentiable."""
        labels = own_tokens(part.labels, self.sequences)
        if self.contract is None:
            return -vocab_parallel_cross_entropy(logits.float() / self.temperature, labels)
        group = self._vocab_group()
        return rl.token_logprob(logits, labels, self.config.shape.vocab, temperature=self.temperature, group=group, contract=self.contract)

    @torch.no_grad()
    def _entropy(self, logits: torch.Tensor) -> torch.Tensor:
        """``[b, n]`` fp32."""
        group = self._vocab_group()
        if self.contract is None:
            return _plain_entropy(logits.float() / self.temperature, group)
        return rl.token_entropy(logits, self.config.shape.vocab, temperature=self.temperature, group=group, contract=self.contract)

    def _vocab_group(self) -> Any:
        return parallel_state.get_tensor_model_parallel_group() if self.layout.layout.tp > 1 else None

    def _collect(self, found: dict[int, list[float]], samples: Samples, part: Batch, values: torch.Tensor) -> None:
        """Keep the values ``[b, n]`` of response tokens by their sequence."""
        values = all_tokens(values.detach(), self.sequences, parallel_state.get_context_parallel_group())
        for row, number in enumerate(part.index):
            if number >= 0:
                first = samples.prompts[number] - 1
                found[number] = values[row, first : first + len(samples.logprobs[number])].tolist()


def _plain_entropy(logits: torch.Tensor, group: Any) -> torch.Tensor:
    """The entropy over a cut vocabulary in torch's own order, for the stock run."""
    top = logits.amax(-1)
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - top[..., None]
    sums = torch.stack([shifted.exp().sum(-1), (shifted.exp() * shifted).sum(-1)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]


def _places(samples: Samples, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """``[b, s]``: the sequence that each predicted response token belongs to, else -1; and the rollout's log-probability of it, else 0."""
    sequence, old = torch.full(part.tokens.shape, -1, dtype=torch.int64), torch.zeros(part.tokens.shape)
    for row, number in enumerate(part.index):
        if number >= 0:
            first, length = samples.prompts[number] - 1, len(samples.logprobs[number])
            sequence[row, first : first + length] = number
            old[row, first : first + length] = torch.tensor(samples.logprobs[number])
    return sequence, old


def _on_first(mine: dict[int, list[float]], count: int) -> list[list[float]]:
    """What all ranks collected, in the order of sequences, on rank 0."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return []
    merged: dict[int, list[float]] = {}
    for theirs in everyone:
        merged.update(theirs)
    return [merged[number] for number in range(count)]

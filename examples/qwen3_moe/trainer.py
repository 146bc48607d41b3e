"""Megatron in one layout: loads a checkpoint, scores tokens, takes training steps, gives the weights back. Every rank runs this."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

import tio_megatron
from tio_megatron.checkpoint import Checkpoint, CheckpointConfig, row_digests, write_checkpoint
from tio_megatron.contract import Contract
from tio_megatron.contract.words import TrainerLayout
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.applied.layout_groups import leave_groups, make_groups
from tio_megatron.integrations.megatron.scoring.logprobs import token_logprobs
from tio_megatron.integrations.megatron.training.grad_patches import finalize_weighted_grads
from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
from tio_megatron.integrations.megatron.weights.transfer import export_weights, load_weights
from tio_megatron.layers.context import own_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.verify import Recording

BATCH_TOKENS = 1024
"""Tokens of one scoring batch, at most."""


@dataclass(frozen=True)
class Batch:
    """``tokens`` [b, s] int64, padded on the right with ``0``; ``labels`` [b, s] the next token of each; ``weights`` [b, s] fp32 of the
    loss of each, 0 on padding; ``index`` [b] number of the sequence, -1 for one that only fills the batch; ``lengths`` [b].
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    index: tuple[int, ...]
    lengths: tuple[int, ...]


class Trainer:
    """One rank of the trainer. ``torch.distributed`` must be ready.

    Args:
        config: the checkpoint's configuration.
        layout: this world's layout.
        contract: the order of every sum, or None for stock Megatron.
        longest: tokens of the longest sequence.
        seed: of Megatron's random states.
        device: where the model lies; on the CPU, stock megatron-core is made to run there.
    """

    def __init__(self, config: CheckpointConfig, layout: TrainerLayout, contract: Contract | None, *, longest: int, seed: int = 1, device: str = "cpu") -> None:
        if device == "cpu":
            cpu_device.enable()
        if contract is not None:
            tio_megatron.apply(contract, vocab_size=config.shape.vocab)
        self.config, self.layout, self.contract, self.device = config, layout, contract, device
        sizes = layout.layout
        make_groups(layout, seed)
        fields = {"moe_token_dispatcher_type": layout.dispatcher} if config.shape.experts else {}
        self.megatron = transformer_config(config, sizes, finalize_model_grads_func=finalize_weighted_grads, calculate_per_token_loss=True, **fields)
        self.model: torch.nn.Module = gpt_model(config, self.megatron, vocab_size=padded_vocab(config, sizes, contract), max_positions=longest).to(device)
        self.optimizer: Any = None
        self.multiple = sizes.tp * (2 * sizes.cp if sizes.cp > 1 else 1)
        self.sequences = Sequences(rank=parallel_state.get_context_parallel_rank(), ranks=sizes.cp)
        self.dp, self.dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def load(self, folder: Path) -> None:
        """Take the weights of an HF folder."""
        with Checkpoint(folder) as checkpoint:
            load_weights(self.model, checkpoint)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def train_with(self, *, lr: float, clip_grad: float) -> None:
        """Add what training needs: Megatron's data parallel wrapper (once) and a new Adam."""
        if self.optimizer is None:
            wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False)
            self.model = DistributedDataParallel(self.megatron, wrapping, self.model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=0.0,
            weight_decay=0.0,
            adam_beta2=0.95,
            clip_grad=clip_grad,
            bf16=self.megatron.bf16,
            params_dtype=self.megatron.params_dtype,
            use_distributed_optimizer=False,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.megatron.grad_scale_func = self.optimizer.scale_loss

    def score(self, sequences: Sequence[Sequence[int]], prompts: Sequence[int], progress: Callable[[int], None] = lambda done: None) -> Recording | None:
        """Log-probability of every token that has a predecessor, and the digest of its full row (ours only). On rank 0; None elsewhere."""
        self.model.eval()
        longest = max(len(sequence) for sequence in sequences)
        mine: dict[int, tuple[list[float], list[bytes]]] = {}
        multiple = self.multiple
        # Rows of a batch are independent, so the size of a batch is chosen for memory alone.
        size = max(1, BATCH_TOKENS // longest)
        for done, part in enumerate(scoring_batches(sequences, ranks=self.dp, rank=self.dp_rank, size=size, multiple=multiple)):
            scored = self._stock(part) if self.contract is None else self._ours(part)
            if scored is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
                mine.update({number: result for number, result in zip(part.index, scored, strict=True) if number >= 0})
            progress(done + 1)
        everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyone)
        if everyone is None:
            return None
        merged: dict[int, tuple[list[float], list[bytes]]] = {}
        for theirs in everyone:
            merged.update(theirs)
        ordered = [merged[i] for i in range(len(sequences))]
        return Recording.of(sequences, prompts, [logprobs for logprobs, _ in ordered], [rows for _, rows in ordered])

    def step(self, sequences: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], *, size: int, lr: float | None = None) -> dict[str, float]:
        """One step of Adam on ``sum of weight * -logprob``; ``weights`` has one number per token with a predecessor.

        Sequences go to data-parallel ranks and micro-batches in their given order. Returns loss (of the last stage) and gradient norm.
        """
        self.model.train()
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._training_batches(sequences, weights, size)
        losses: list[float] = []

        def loss_of(losses_of_tokens: torch.Tensor, part: Batch) -> tuple[torch.Tensor, ...]:
            total = (losses_of_tokens.float() * own_tokens(part.weights.to(self.device), self.sequences)).sum()
            losses.append(float(total.detach()))
            # Weights count every token once, so nothing is divided afterwards.
            return total, torch.tensor(part.weights.numel(), dtype=torch.int), {}

        self._schedule(parts, loss_of, forward_only=False)
        updated, norm, _ = self.optimizer.step()
        return {"loss": sum(losses), "grad_norm": float(norm or 0.0), "updated": float(bool(updated))}

    def export(self, folder: Path, *, files: Sequence[Path] = ()) -> dict[str, str]:
        """Write the weights as an HF folder from rank 0; returns the manifest there, nothing elsewhere. The folder is there on return."""
        stream = export_weights(self.model, self.config, destination=0)
        digests = {}
        if dist.get_rank() == 0:
            digests = write_checkpoint(folder, self.config.raw, stream, files=files)
        else:
            for _ in stream:
                pass
        dist.barrier()
        return digests

    def close(self) -> None:
        """Leave Megatron's groups."""
        leave_groups(self.contract)

    def _training_batches(self, sequences: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None, size: int) -> list[Batch]:
        """This rank's micro-batches, all of one shape, as many on every data-parallel rank."""
        parts = []
        for number in range(-(-len(sequences) // (self.dp * size))):
            lo = (number * self.dp + self.dp_rank) * size
            index = range(min(lo, len(sequences)), min(lo + size, len(sequences)))
            parts.append(batch(sequences, index, weights, size=size, length=max(map(len, sequences)), multiple=self.multiple))
        return parts

    def _schedule(self, parts: Sequence[Batch], loss_of: Callable[..., tuple[Any, ...]], *, forward_only: bool, logits: bool = False) -> None:
        """Megatron's schedule over the micro-batches; ``loss_of`` is given each token's loss, or with ``logits`` these, on the last pipeline stage."""
        length = parts[0].tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=self.device).triu_(1) if self.sequences.ranks == 1 else None

        def forward(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[Any, ...]]]:
            part = next(iterator)
            tokens, labels = (own_tokens(t.to(self.device), self.sequences) for t in (part.tokens, part.labels))
            positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
            output = model(tokens, positions, mask, labels=None if logits else labels)
            return output, lambda result: loss_of(result, part)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=[self.model],
            num_microbatches=len(parts),
            seq_length=length,
            micro_batch_size=parts[0].tokens.shape[0],
            forward_only=forward_only,
        )

    def _ours(self, part: Batch) -> list[tuple[list[float], list[bytes]]] | None:
        """Log-probabilities and row digests of a batch's sequences by the package; None but on the last stage."""
        # Padding is passed as tokens: data-parallel ranks then take equal shapes, and no token reads a later one.
        wanted = [range(length - 1) for length in part.lengths]
        scores = token_logprobs(self.model, list(part.tokens), rows=wanted)
        if scores is None:
            return None
        return [(logprobs[: len(rows)].tolist(), row_digests(rows)) for logprobs, rows in zip(scores.logprobs, scores.rows, strict=True)]

    def _stock(self, part: Batch) -> list[tuple[list[float], list[bytes]]] | None:
        """The same by stock Megatron: its own cross entropy, negated; no rows."""
        found: list[torch.Tensor] = []

        def keep(losses: torch.Tensor, part: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
            found.append(-losses.float())
            return losses.new_zeros(()), {}

        with torch.no_grad():
            self._schedule([part], keep, forward_only=True)
        if not found:
            return None
        return [(logprobs[: length - 1].tolist(), []) for logprobs, length in zip(found[0], part.lengths, strict=True)]


def scoring_batches(sequences: Sequence[Sequence[int]], *, ranks: int, rank: int, size: int, multiple: int) -> list[Batch]:
    """This rank's batch of each scoring step. Sequences are sorted by length, so that little is padded.

    Args:
        sequences: tokens of each, at least two.
        ranks: data-parallel ranks; all of them take every step, some perhaps with nothing of their own.
        rank: this one.
        size: sequences in a batch.
        multiple: what padded lengths must divide by (tensor parallel size, for sequence parallelism).
    """
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    made = []
    for start in range(0, len(order), size * ranks):
        group = order[start : start + size * ranks]
        mine = group[rank * size : (rank + 1) * size]
        made.append(batch(sequences, mine, None, size=min(size, len(group)), length=max(len(sequences[i]) for i in group), multiple=multiple))
    return made


def batch(
    sequences: Sequence[Sequence[int]], index: Sequence[int], weights: Sequence[Sequence[float]] | None, *, size: int, length: int, multiple: int
) -> Batch:
    """The sequences numbered ``index`` as one batch of ``size`` rows of at least ``length`` tokens."""
    width = -(-length // multiple) * multiple
    tokens = torch.zeros(size, width, dtype=torch.int64)
    labels = torch.zeros(size, width, dtype=torch.int64)
    weight = torch.zeros(size, width, dtype=torch.float32)
    for row, number in enumerate(index):
        sequence = torch.tensor(sequences[number], dtype=torch.int64)
        tokens[row, : len(sequence)] = sequence
        labels[row, : len(sequence) - 1] = sequence[1:]
        if weights is not None:
            weight[row, : len(sequence) - 1] = torch.tensor(weights[number], dtype=torch.float32)
    fill = size - len(index)
    return Batch(tokens, labels, weight, (*index, *[-1] * fill), (*[len(sequences[i]) for i in index], *[1] * fill))


def pretrain(
    trainer: Trainer,
    stream: Any,
    *,
    steps: int,
    seconds: float,
    length: int,
    sequences: int,
    lr: float,
    seed: int,
    progress: Callable[[int, float], None],
) -> int:
    """Plain next-token training on windows of ``stream``; stops early after ``seconds``. Returns the steps taken."""
    generator = torch.Generator().manual_seed(seed)
    weight = [1.0 / (sequences * (length - 1))] * (length - 1)
    began = time.monotonic()
    for number in range(steps):
        starts = torch.randint(0, len(stream) - length, (sequences,), generator=generator).tolist()
        windows = [stream[start : start + length].tolist() for start in starts]
        warm = min(1.0, (number + 1) / 20)
        found = trainer.step(windows, [weight] * sequences, size=max(1, sequences // trainer.dp), lr=lr * warm)
        late = [time.monotonic() - began > seconds]
        dist.broadcast_object_list(late)  # the ranks' clocks may disagree, rank 0 decides
        progress(number + 1, found["loss"])
        if late[0]:
            return number + 1
    return steps

"""Supervised training in any layout: the model in megatron-core's DDP with its Adam and its schedule, one global batch a step.

What a step computes is a function of the global batch; how it is cut (layout, micro-batches, order of samples, packing) must not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

import tio_megatron
from tio_megatron.checkpoint import Checkpoint, Weights
from tio_megatron.contract import Contract
from tio_megatron.contract.words import TrainerLayout
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.applied.layout_groups import leave_groups, make_groups
from tio_megatron.integrations.megatron.resume.optimizer_state import KINDS, export_state
from tio_megatron.integrations.megatron.resume.train_state import Restored, load_training, save_training
from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
from tio_megatron.integrations.megatron.weights.transfer import export_weights, load_weights
from tio_megatron.layers.context import own_tokens
from tio_megatron.layers.sequences import Sequences

ORDERS = ("given", "interleaved", "by length")


@dataclass(frozen=True)
class Cut:
    """How the same training is cut. None of it may change a byte.

    Args:
        layout: ranks and what each does.
        micro_batch: samples of a micro-batch.
        distributed_optimizer: shards of the optimizer over data parallelism.
        overlap: reduce gradients while the backward pass runs.
        recompute: recompute every layer in the backward pass.
        packed: samples of a micro-batch in one row.
        order: which samples a rank takes: neighbours (``given``), every n-th (``interleaved``), or neighbours after sorting ``by length``.
        grouped: experts under the names of grouped experts, else sequential.
    """

    layout: TrainerLayout
    micro_batch: int = 1
    distributed_optimizer: bool = False
    overlap: bool = False
    recompute: bool = False
    packed: bool = False
    order: str = "given"
    grouped: bool = True

    def __str__(self) -> str:
        flags = [name.replace("_", " ") for name in ("distributed_optimizer", "overlap", "recompute", "packed") if getattr(self, name)]
        flags += [] if self.grouped else ["sequential"]
        flags += [] if self.order == "given" else [self.order]
        return ", ".join([str(self.layout), f"micro-batch {self.micro_batch}", *flags])


@dataclass(frozen=True)
class Recipe:
    """What is trained and how; all of it decides the result. ``model``: an HF folder, or weights that are held in memory."""

    model: Path | Weights
    steps: int = 20
    samples: int = 8
    longest: int = 96
    shortest: int = 24
    lr: float = 2e-3
    warmup: int = 4
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    seed: int = 1234
    aux_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.steps < 1 or not 1 <= self.shortest <= self.longest:
            sizes = f"{self.samples} samples of {self.shortest} to {self.longest} tokens, {self.steps} steps"
            raise ValueError(f"training: {sizes}; at least one sample of one token and one step are needed")


class Training:
    """One rank of a training run. ``torch.distributed`` must be ready.

    Args:
        recipe: the training.
        cut: this world's way of doing it.
        contract: the order of every sum, or ``None`` for stock megatron-core.
    """

    def __init__(self, recipe: Recipe, cut: Cut, contract: Contract | None) -> None:
        self.recipe, self.cut, self.contract = recipe, cut, contract
        sizes = cut.layout.layout
        cpu_device.enable()
        with Checkpoint(recipe.model) if isinstance(recipe.model, Path) else contextlib.nullcontext(recipe.model) as checkpoint:
            self.config = checkpoint.config
            if contract is not None:
                tio_megatron.apply(contract, vocab_size=self.config.shape.vocab)
            make_groups(cut.layout, recipe.seed)
            self.megatron = transformer_config(self.config, sizes, finalize_model_grads_func=finalize_model_grads, **self._fields())
            bare = gpt_model(self.config, self.megatron, vocab_size=padded_vocab(self.config, sizes), max_positions=recipe.longest)
            load_weights(bare, checkpoint)
            if contract is None:
                _clear_padding(bare, self.config.shape.vocab)
        wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=cut.overlap, use_distributed_optimizer=cut.distributed_optimizer)
        self.model = DistributedDataParallel(self.megatron, wrapping, bare)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=recipe.lr,
            min_lr=recipe.lr / 10,
            weight_decay=recipe.weight_decay,
            clip_grad=recipe.clip_grad,
            bf16=self.megatron.bf16,
            params_dtype=self.megatron.params_dtype,
            use_distributed_optimizer=cut.distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.megatron.grad_scale_func = self.optimizer.scale_loss
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=recipe.lr,
            min_lr=recipe.lr / 10,
            lr_warmup_steps=recipe.warmup,
            lr_decay_steps=max(recipe.steps, recipe.warmup + 1),
            lr_decay_style="cosine",
            start_wd=recipe.weight_decay,
            end_wd=recipe.weight_decay,
            wd_incr_steps=recipe.steps,
            wd_incr_style="constant",
        )
        self.step_number = 0

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"calculate_per_token_loss": True}
        if self.config.shape.experts:
            fields |= {"moe_token_dispatcher_type": self.cut.layout.dispatcher, "moe_grouped_gemm": self.cut.grouped and self.contract is not None}
        if self.recipe.aux_loss:
            fields |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": self.recipe.aux_loss}
        if self.cut.recompute:
            fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return fields

    def step(self) -> tuple[float, float]:
        """One step on the next global batch. Returns the loss per token (of the last pipeline stage's samples) and the gradients' norm."""
        samples = global_batch(self.recipe, self.config.shape.vocab, self.step_number)
        parts = [self._micro_batch(samples, index) for index in self._share(samples)]
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums: list[float] = []

        def forward(iterator: Iterator[dict[str, Any]], stage: Any) -> tuple[torch.Tensor, Any]:
            part = next(iterator)
            losses = stage(part["tokens"], part["positions"], None, labels=part["labels"], packed_seq_params=part["packing"], padding_mask=part["padding"])

            def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                total = (per_token.float() * part["counts"]).sum()
                sums.append(float(total.detach()))
                return total, part["counts"].sum().to(torch.int), {}

            return losses, loss

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=[self.model],
            num_microbatches=len(parts),
            seq_length=parts[0]["tokens"].shape[1] * self.cut.layout.layout.cp,
            micro_batch_size=parts[0]["tokens"].shape[0],
            forward_only=False,
        )
        done, norm, _ = self.optimizer.step()
        if not done:
            raise RuntimeError(f"step {self.step_number}: the optimizer did not take it")
        self.schedule.step(increment=1)
        self.step_number += 1
        tokens = sum(len(sample) - 1 for sample in samples) / parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return sum(sums) / tokens, float(norm)

    def _share(self, samples: Sequence[Sequence[int]]) -> list[list[int]]:
        """The samples of this rank's micro-batches."""
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        order = list(range(len(samples)))
        if self.cut.order == "by length":
            order.sort(key=lambda i: (len(samples[i]), i))
        share = len(order) // ranks
        if share * ranks != len(order) or share % self.cut.micro_batch:
            raise ValueError(f"a global batch of {len(order)} samples does not divide by {ranks} data-parallel ranks times micro-batch {self.cut.micro_batch}")
        mine = order[rank::ranks] if self.cut.order == "interleaved" else order[rank * share : (rank + 1) * share]
        return [mine[i : i + self.cut.micro_batch] for i in range(0, share, self.cut.micro_batch)]

    def _micro_batch(self, samples: Sequence[Sequence[int]], index: Sequence[int]) -> dict[str, Any]:
        """This rank's part of a micro-batch: ``tokens`` and ``labels`` [b, s], ``counts`` 1.0 where a loss counts, ``padding`` True behind samples."""
        sizes = self.cut.layout.layout
        multiple = (2 * sizes.cp if sizes.cp > 1 else 1) * (sizes.tp if sizes.sp else 1)
        chosen = [torch.tensor(samples[i]) for i in index]
        pipeline = sizes.pp > 1
        longest = self.recipe.longest if pipeline else max(len(sample) - 1 for sample in chosen)
        widths = [-(-(len(sample) - 1 if self.cut.packed else longest) // multiple) * multiple for sample in chosen]
        rows = []
        for sample, width in zip(chosen, widths, strict=True):
            row = torch.zeros(3, width, dtype=torch.int64)
            row[0, : len(sample) - 1], row[1, : len(sample) - 1], row[2, : len(sample) - 1] = sample[:-1], sample[1:], 1
            rows.append(row)
        packing = None
        if self.cut.packed:
            total = len(rows) * -(-self.recipe.longest // multiple) * multiple if pipeline else sum(widths)
            rows.append(torch.zeros(3, total - sum(widths), dtype=torch.int64))
            starts = torch.tensor([0, *widths] + ([total - sum(widths)] if total > sum(widths) else [])).cumsum(0).to(torch.int32)
            packing = PackedSeqParams("thd", starts, starts, max_seqlen_q=int(starts.diff().max()), max_seqlen_kv=int(starts.diff().max()))
            whole = torch.cat(rows, 1)[:, None]
        else:
            starts = None
            whole = torch.stack(rows, 1)
        whole = own_tokens(whole.transpose(0, 1).transpose(1, 2), Sequences(starts, parallel_state.get_context_parallel_rank(), sizes.cp))
        whole = whole.permute(2, 0, 1)
        tokens, labels, counts = whole
        return {
            "tokens": tokens.contiguous(),
            "labels": labels.contiguous(),
            "counts": counts.float(),
            "padding": (counts == 0) if bool((counts == 0).any()) and self.config.shape.experts and self.contract is not None else None,
            "positions": torch.arange(tokens.shape[1]).expand_as(tokens),
            "packing": packing,
        }

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``kind/name`` and the whole tensor: weights, fp32 main parameters and both moments, by HF name. Every rank gets and must exhaust it."""
        for name, tensor in export_weights(self.model, self.config, destination=None):
            assert tensor is not None
            yield f"weight/{name}", tensor
        for kind in KINDS:
            for name, tensor in export_state(self.model, self.optimizer, self.config, kind, destination=None):
                yield f"{kind}/{name}", tensor

    def sha256(self) -> str:
        """One digest of :meth:`state`, in the order of names."""
        digests = {name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest() for name, tensor in self.state()}
        return hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(digests.items())).encode()).hexdigest()

    def save(self, folder: Path) -> Path:
        """Write a checkpoint into ``folder`` and make it the newest there. Every rank calls it."""
        state = {"step": self.step_number, "position": {"next_step": self.step_number}, "settings": self._settings()}
        return save_training(folder, self.model, self.optimizer, self.schedule, self.config, **state)

    def resume(self, folder: Path) -> Restored:
        """Go on where the newest checkpoint in ``folder`` stopped, whatever layout wrote it. Every rank calls it."""
        found = load_training(folder, self.model, self.optimizer, self.schedule, self.config, settings=self._settings())
        self.step_number = found.position["next_step"]
        return found

    def _settings(self) -> dict[str, Any]:
        """Of the recipe, what decides the future; where the first weights came from does not."""
        return {name: value for name, value in asdict(self.recipe).items() if name != "model"}

    def close(self) -> None:
        """Leave Megatron's groups."""
        leave_groups(self.contract)


def global_batch(recipe: Recipe, vocab: int, step: int) -> list[list[int]]:
    """The samples of one step, of different lengths; a function of the recipe and the step alone."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    lengths = torch.randint(recipe.shortest, recipe.longest + 1, (recipe.samples,), generator=generator).tolist()
    # Half of the tokens repeat the one before plus one: something to learn.
    samples = []
    for length in lengths:
        tokens = torch.randint(vocab, (length + 1,), generator=generator)
        follow = torch.rand(length + 1, generator=generator) < 0.5
        for i in range(1, length + 1):
            if follow[i]:
                tokens[i] = (tokens[i - 1] + 1) % vocab
        samples.append(tokens.tolist())
    return samples


def _clear_padding(model: torch.nn.Module, vocab: int) -> None:
    """Stock counts padding rows of the vocabulary: give it zeros."""
    for name, weight in model.named_parameters():
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            first = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
            with torch.no_grad():
                weight[max(0, vocab - first) :] = 0.0


def parse(layout: str, **fields: Any) -> Cut:
    """A cut from the words of :meth:`TrainerLayout.parse`."""
    return replace(Cut(TrainerLayout.parse(layout)), **fields)

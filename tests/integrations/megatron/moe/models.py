"""A whole tiny Qwen3-MoE through stock GPTModel under ``apply()``, in any layout: log-probabilities and one training step."""

import functools
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tio_megatron.checkpoint import Checkpoint, tensor_table
from tio_megatron.contract import Contract, Layout
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.apply import apply
from tio_megatron.integrations.megatron.from_hf import gpt_model, padded_vocab, transformer_config
from tio_megatron.integrations.megatron.scoring import token_logprobs
from tio_megatron.integrations.megatron.weights import export_weights, load_weights
from tio_megatron.testing import assert_same_bytes, run_ranks
from tio_megatron.testing.qwen3 import MOE, ragged, write_tiny

VOCAB = MOE["vocab_size"]
SEQUENCES = ragged((170, 1, 65, 97))


@dataclass(frozen=True)
class Row:
    """``tp``, ``ep``, ``etp``, ``pp``, dispatcher, top-k, dtype, grouped experts; sequence parallelism with tp unless ``inference``."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    way: str = "alltoall"
    k: int = 4
    dtype: str = "float32"
    grouped: bool = True
    inference: bool = False

    @property
    def world(self):
        return self.pp * max(self.tp, self.ep * self.etp)

    @property
    def layout(self):
        return Layout(tp=self.tp, ep=self.ep, etp=self.etp, pp=self.pp, sp=self.tp > 1 and not self.inference, dp=self.world // self.pp // self.tp)

    def __str__(self):
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "ep", "etp", "pp") if getattr(self, name) > 1]
        return "-".join([*sizes, self.way, f"k{self.k}", self.dtype, "grouped" if self.grouped else "sequential"] + ["inference"] * self.inference)


@functools.cache
def folder(k, dtype):
    """A checkpoint with 16 experts of width 96. Kept until the interpreter ends."""
    held = TemporaryDirectory(prefix="tio-moe-")
    folder.held = [*getattr(folder, "held", []), held]
    return write_tiny(Path(held.name) / "model", MOE, num_experts=16, moe_intermediate_size=96, num_experts_per_tok=k, torch_dtype=dtype)


def start(row):
    parallel_state.initialize_model_parallel(
        row.tp, pipeline_model_parallel_size=row.pp, expert_model_parallel_size=row.ep, expert_tensor_parallel_size=row.etp
    )
    model_parallel_cuda_manual_seed(1)


def build(row, contract, **fields):
    with Checkpoint(folder(row.k, row.dtype)) as checkpoint:
        config = transformer_config(checkpoint.config, row.layout, moe_token_dispatcher_type=row.way, moe_grouped_gemm=row.grouped, **fields)
        model = gpt_model(checkpoint.config, config, vocab_size=padded_vocab(checkpoint.config, row.layout, contract))
        load_weights(model, checkpoint)
    return model


def scores(rank, row, plants):
    """{name: [logprobs of each of this rank's sequences]}, on the last stage. Data-parallel ranks have sequences of their own, of uneven lengths."""
    cpu_device.enable()
    start(row)
    mine = SEQUENCES[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    with apply(Contract(), vocab_size=VOCAB):
        model = build(row, Contract())
        found = {"ours": token_logprobs(model, mine)}
        for name, plant in plants.items():
            with plant():
                found[name] = token_logprobs(model, mine)
    place = parallel_state.get_data_parallel_rank()
    return place, {name: value.logprobs for name, value in found.items() if value is not None}


def joined(results, name):
    """All sequences' log-probabilities in their order, as one tensor; ranks that hold the same ones must agree."""
    by_place = {}
    for place, found in results:
        if name in found:
            for ours, theirs in zip(found[name], by_place.setdefault(place, found[name]), strict=True):
                assert_same_bytes(ours, theirs, f"ranks of data-parallel place {place}")
    count = len(by_place)
    return torch.cat([by_place[i % count][i // count] for i in range(len(SEQUENCES))])


@functools.cache
def alone(k, dtype):
    return joined(run_ranks(1, scores, Row(k=k, dtype=dtype), {}, timeout=200), "ours")


def train(rank, row, steps=1, distributed=False, fields=()):
    """``steps`` optimizer steps on 8 samples of 64 tokens, spread over data-parallel ranks, one sample a micro-batch.

    Args:
        distributed: with the distributed optimizer.
        fields: further fields of Megatron's config.


    Returns (on rank 0) the loss, the gradients of the last step and the weights after it, by HF name; the loss is the last stage's.
    """
    cpu_device.enable()
    start(row)
    with apply(Contract(), vocab_size=VOCAB):
        bare = build(row, Contract(), **dict(fields))
        config = bare.config
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=row.pp == 1, use_distributed_optimizer=distributed)
        model = DistributedDataParallel(config, ddp, bare)
        adam = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=row.dtype == "bfloat16", clip_grad=0.0, use_distributed_optimizer=distributed)
        optimizer = get_megatron_optimizer(adam, [model])
        tokens = torch.tensor(ragged((65,) * 8, seed=7))
        dp, place = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

        def step(batches, stage):
            sample = next(batches)[None]
            positions = torch.arange(64)[None]
            losses = stage(sample[:, :-1], positions, None, labels=sample[:, 1:])
            return losses, lambda each: (each.float().mean(), {"loss": each.detach().float().mean()})

        for _ in range(steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            reduced = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(tokens[place::dp]),
                model=[model],
                num_microbatches=8 // dp,
                seq_length=64,
                micro_batch_size=1,
                forward_only=False,
            )
            gradients = _exported(bare, row, swap=True)
            assert optimizer.step()[0]
        loss = torch.stack([r["loss"] for r in reduced]).mean().item() if reduced else None
        return loss, gradients, _exported(bare, row)


def _exported(model, row, swap=False):
    """Parameters, or with ``swap`` their gradients (rounded to the model's dtype), whole and by HF name, on rank 0."""
    held = [p.data for p in model.parameters()]
    with Checkpoint(folder(row.k, row.dtype)) as checkpoint:
        if swap:
            for parameter in model.parameters():
                parameter.data = parameter.main_grad.to(parameter.dtype)
        found = {name: value.clone() for name, value in export_weights(model, checkpoint.config) if value is not None}
    for parameter, data in zip(model.parameters(), held, strict=True):
        parameter.data = data
    return found


def weights(row):
    """The checkpoint's tensors by HF name."""
    with Checkpoint(folder(row.k, row.dtype)) as checkpoint:
        return {name: checkpoint.tensor(name) for name in tensor_table(checkpoint.config.shape)}


def stock_logprobs(row):
    """Log-probabilities of the first sequence from Megatron's own model, on one rank."""
    ids = torch.tensor(SEQUENCES[0])[None]
    model = build(row, Contract())
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    with torch.no_grad():
        logits = model(ids, torch.arange(length)[None], mask)[0, :, :VOCAB].float()
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]

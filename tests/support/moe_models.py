"""A whole tiny Qwen3-MoE through stock GPTModel under ``apply()``, in any layout: log-probabilities and training steps. For tests only."""

import fcntl
import functools
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from tiny_megatron import Setup, build, ddp, running

from tio_megatron.checkpoint import Checkpoint, tensor_table
from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.integrations.megatron.weights.transfer import export_weights
from tio_megatron.testing import assert_same_bytes, run_ranks
from tio_megatron.testing.qwen3 import MOE, ragged, write_tiny

SEQUENCES = ragged((170, 1, 65, 97))


@dataclass(frozen=True)
class Row:
    """``tp``, ``ep``, ``etp``, ``pp``, ``cp``, dispatcher, top-k, dtype, grouped experts; sequence parallelism with tp unless ``inference``."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    way: str = "alltoall"
    k: int = 4
    dtype: str = "float32"
    grouped: bool = True
    inference: bool = False
    cp: int = 1

    @property
    def world(self):
        return self.pp * max(self.tp * self.cp, self.ep * self.etp)

    def setup(self, **fields):
        """With further fields of Megatron's config."""
        dp = self.world // self.pp // self.tp // self.cp
        layout = Layout(tp=self.tp, ep=self.ep, etp=self.etp, pp=self.pp, cp=self.cp, sp=self.tp > 1 and not self.inference, dp=dp)
        chosen = {"moe_token_dispatcher_type": self.way, "moe_grouped_gemm": self.grouped}
        return Setup(folder(self.k, self.dtype), layout, fields=chosen | fields)

    def __str__(self):
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "ep", "etp", "pp", "cp") if getattr(self, name) > 1]
        return "-".join([*sizes, self.way, f"k{self.k}", self.dtype, "grouped" if self.grouped else "sequential"] + ["inference"] * self.inference)


HELD = TemporaryDirectory(prefix="tio-moe-")
"""Made by the process that starts the ranks, which removes it when it ends; ranks end without cleaning up."""


def folder(k, dtype):
    """A checkpoint with 16 experts of width 96, made by whoever asks first."""
    path = Path(HELD.name) / f"{k}-{dtype}"
    with open(Path(HELD.name) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path if path.exists() else write_tiny(path, MOE, num_experts=16, moe_intermediate_size=96, num_experts_per_tok=k, torch_dtype=dtype)


def weights(row):
    """The checkpoint's tensors by HF name."""
    with Checkpoint(folder(row.k, row.dtype)) as checkpoint:
        return {name: checkpoint.tensor(name) for name in tensor_table(checkpoint.config.shape)}


def scores(rank, row, plants):
    """{name: [logprobs of each of this rank's sequences]}, on the last stage. Data-parallel ranks have sequences of their own, of uneven lengths."""
    setup = row.setup()
    with running(setup), Checkpoint(setup.path) as checkpoint:
        model = build(setup, checkpoint)
        place, count = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        found = {"ours": token_logprobs(model, SEQUENCES[place::count])}
        for name, plant in plants.items():
            with plant():
                found[name] = token_logprobs(model, SEQUENCES[place::count])
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
    """The log-probabilities of one rank."""
    return joined(run_ranks(1, scores, Row(k=k, dtype=dtype), {}, timeout=200), "ours")


def train(rank, row, steps=1, distributed=False, fields=()):
    """``steps`` optimizer steps on 8 samples of 64 tokens, spread over data-parallel ranks, one sample a micro-batch.

    Args:
        distributed: with the distributed optimizer.
        fields: further fields of Megatron's config.

    Returns:
        The loss (on the last stage); on rank 0 the gradients of the last step and the weights after it, by HF name.
    """
    setup = row.setup(**dict(fields))
    with running(setup), Checkpoint(setup.path) as checkpoint:
        bare = build(setup, checkpoint)
        model = ddp(bare, overlap_grad_reduce=row.pp == 1, use_distributed_optimizer=distributed)
        adam = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=row.dtype == "bfloat16", clip_grad=0.0, use_distributed_optimizer=distributed)
        optimizer = get_megatron_optimizer(adam, [model])
        dp = parallel_state.get_data_parallel_world_size()
        mine = torch.tensor(ragged((65,) * 8, seed=7))[parallel_state.get_data_parallel_rank() :: dp]
        for _ in range(steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            reduced = get_forward_backward_func()(
                forward_step_func=_step,
                data_iterator=iter(mine),
                model=[model],
                num_microbatches=len(mine),
                seq_length=64,
                micro_batch_size=1,
                forward_only=False,
            )
            gradients = _exported(bare, checkpoint, swap=True)
            assert optimizer.step()[0]
        loss = torch.stack([r["loss"] for r in reduced]).mean().item() if reduced else None
        return loss, gradients, _exported(bare, checkpoint)


def _step(samples, stage):
    sample = next(samples)[None]
    losses = stage(sample[:, :-1], torch.arange(64)[None], None, labels=sample[:, 1:])
    return losses, lambda each: (each.float().sum() / 512, torch.tensor(1, dtype=torch.int), {"loss": each.detach().float().mean()})


def _exported(model, checkpoint, swap=False):
    """Parameters, or with ``swap`` their gradients (rounded to the model's dtype), whole and by HF name, on rank 0."""
    held = [p.data for p in model.parameters()]
    if swap:
        for parameter in model.parameters():
            parameter.data = parameter.main_grad.to(parameter.dtype)
    found = {name: value.clone() for name, value in export_weights(model, checkpoint.config) if value is not None}
    for parameter, data in zip(model.parameters(), held, strict=True):
        parameter.data = data
    return found

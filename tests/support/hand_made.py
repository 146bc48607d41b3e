"""Optimizer steps on gradients made by hand: the same global tensors in every layout, so only the optimizer can differ. For tests only."""

import fcntl
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tiny_megatron import Setup, build, ddp, running

from tio_megatron.checkpoint import Checkpoint, tensor_table
from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron.resume.optimizer_state import KINDS, export_state
from tio_megatron.integrations.megatron.weights.pieces import pieces, unwrap
from tio_megatron.integrations.megatron.weights.transfer import export_weights
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

HELD = TemporaryDirectory(prefix="tio-optimizer-")
SIZES = dict(num_hidden_layers=2, hidden_size=128, num_experts=4, moe_intermediate_size=64, vocab_size=700)


@dataclass(frozen=True)
class Row:
    """A layout; ``sharded``: the distributed optimizer; ``ordered``: under the contract, else stock. ``fields`` of Megatron's config."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    dp: int = 1
    sharded: bool = False
    dtype: str = "bfloat16"
    grouped: bool = True
    tied: bool = False
    ordered: bool = True
    fields: tuple = field(default=())

    @property
    def world(self):
        return self.tp * self.pp * self.dp

    @property
    def setup(self):
        layout = Layout(tp=self.tp, ep=self.ep, etp=self.etp, pp=self.pp, dp=self.dp, sp=self.tp > 1)
        fields = {"moe_grouped_gemm": self.grouped and self.ordered, "moe_token_dispatcher_type": "alltoall"} | dict(self.fields)
        return Setup(folder(self.dtype, self.tied), layout, ordered=self.ordered, padding=0.0, fields=fields)

    def __str__(self):
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "ep", "etp", "pp", "dp") if getattr(self, name) > 1] or ["one"]
        flags = [name for name in ("sharded", "tied") if getattr(self, name)] + ([] if self.grouped else ["sequential"])
        return "-".join([*sizes, *flags, self.dtype, *(f"{name}={value}" for name, value in self.fields)])


def folder(dtype, tied=False):
    """A checkpoint, made by whoever asks first."""
    path = Path(HELD.name) / f"{dtype}-{tied}"
    with open(Path(HELD.name) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path if path.exists() else write_tiny(path, MOE, **SIZES, torch_dtype=dtype, tie_word_embeddings=tied)


@cache
def gradients(seed, dtype="bfloat16", tied=False, size=1e-2):
    """{HF name: fp32 gradient} of the whole model. Sizes differ by tensor, so that an order of adding their squares would show."""
    generator = torch.Generator().manual_seed(seed)
    with Checkpoint(folder(dtype, tied)) as checkpoint:
        table = tensor_table(checkpoint.config.shape)
    return {name: torch.randn(spec.shape, generator=generator) * size * 10.0 ** float(torch.randn((), generator=generator)) for name, spec in table.items()}


def give(model, whole):
    """Write this rank's part of the global gradients to its ``main_grad``; vocabulary padding gets zeros."""
    inner = unwrap(model)
    with Checkpoint(inner.tio_path) as checkpoint:
        shape = checkpoint.config.shape
    buffers = {name: parameter.main_grad for name, parameter in inner.named_parameters()}
    for buffer in buffers.values():
        buffer.zero_()
    for piece in pieces(inner, shape, values=buffers):
        part = whole[piece.name].narrow(piece.axis, piece.start, piece.stop - piece.start)
        piece.view.copy_(part.reshape(piece.view.shape))


def made(row, **options):
    """On a rank: the model in DDP and its optimizer."""
    setup = row.setup
    with Checkpoint(setup.path) as checkpoint:
        bare = build(setup, checkpoint)
    bare.tio_path = setup.path
    model = ddp(bare, use_distributed_optimizer=row.sharded)
    chosen = dict(
        optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.95, bf16=row.dtype == "bfloat16", use_distributed_optimizer=row.sharded
    )
    return model, get_megatron_optimizer(OptimizerConfig(**chosen | options), [model])


def everything(model, optimizer, row):
    """{kind: {HF name: tensor}} of weights, main parameters and moments, on rank 0."""
    with Checkpoint(row.setup.path) as checkpoint:
        found = {kind: dict(export_state(model, optimizer, checkpoint.config, kind)) for kind in KINDS}
        return found | {"weight": dict(export_weights(model, checkpoint.config))}


def step(model, optimizer, row, seed):
    """One step on the gradients of ``seed``: (successful, norm)."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    give(model, gradients(seed, row.dtype, row.tied))
    return optimizer.step()[:2]


def trained(rank, row, steps, options):
    """The norms of ``steps`` steps and, on rank 0, everything after them."""
    with running(row.setup):
        model, optimizer = made(row, **options)
        norms = []
        for seed in range(steps):
            # A schedule as a training loop has it.
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = 1e-2 * (seed + 1) / steps, 0.1 * group["wd_mult"]
            done, norm = step(model, optimizer, row, seed)
            assert done
            norms.append(norm)
        return norms, everything(model, optimizer, row), parallel_state.get_data_parallel_rank()


def run(row, steps=3, **options):
    """(norms, everything) of a row; all ranks must report the same norms."""
    results = run_ranks(row.world, trained, row, steps, options, timeout=200)
    assert all(norms == results[0][0] for norms, *_ in results)
    return results[0][:2]

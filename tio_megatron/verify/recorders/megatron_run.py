"""Building a Megatron model from an HF folder to record it: on a CPU too, alone or as a rank of torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist


def run_megatron(model: Path, sequences: Sequence[Sequence[int]], folder: Path, *, tp: int, ep: int, sp: bool, stock: bool, **options: Any) -> None:
    """Build the model in the layout, load its weights, record it. ``options`` as of :func:`record_megatron`.

    Raises:
        ValueError: torchrun started another number of ranks than the layout needs.
    """
    import tio_megatron
    from tio_megatron.checkpoint import Checkpoint
    from tio_megatron.contract import Contract, Layout
    from tio_megatron.integrations.megatron import cpu_device
    from tio_megatron.integrations.megatron.from_hf import gpt_model, padded_vocab, transformer_config
    from tio_megatron.integrations.megatron.tracing import parallel
    from tio_megatron.integrations.megatron.weights import load_weights
    from tio_megatron.verify.recorders.megatron import record_megatron

    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = Layout(tp=tp, ep=ep, etp=1 if ep > 1 else None, sp=sp and tp > 1)
    needed = max(tp, ep)
    if world != needed:
        raise ValueError(f"tp {tp} and ep {ep} need {needed} ranks, there are {world}: torchrun --nproc-per-node {needed} -m tio_megatron record ...")
    with TemporaryDirectory() as held, contextlib.ExitStack() as stack, Checkpoint(model) as checkpoint:
        if not torch.cuda.is_available():
            stack.enter_context(cpu_device.enabled())
        if not dist.is_initialized():
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            if "RANK" in os.environ:
                dist.init_process_group(backend)
            else:
                dist.init_process_group(backend, init_method=f"file://{held}/rendezvous", rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(parallel(layout))
        config, contract = checkpoint.config, Contract()
        if not stock:
            stack.enter_context(tio_megatron.apply(contract, vocab_size=config.shape.vocab))
        rows = padded_vocab(config, layout, None if stock else contract)
        built = gpt_model(config, transformer_config(config, layout, calculate_per_token_loss=True), vocab_size=rows).eval()
        load_weights(built, checkpoint)
        record_megatron(built, config, sequences, folder, **options)

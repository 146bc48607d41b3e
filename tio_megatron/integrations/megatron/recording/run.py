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


def run_megatron(
    model: Path, sequences: Sequence[Sequence[int]], folder: Path, *, layout: str = "tp1", stock: bool = False, contract: str | None = None, **options: Any
) -> None:
    """Build the model in the layout, load its weights, record it. ``options`` as of :func:`record_megatron`.

    Args:
        model: HF folder.
        sequences: token ids.
        folder: of the trace.
        layout: words as ``tp2+ep2+pp2+allgather``, see :class:`tio_megatron.contract.words.TrainerLayout`.
        stock: the engine as it is.
        contract: as ``TIO_CONTRACT``; that variable's, or the default contract.

    Raises:
        ValueError: torchrun started another number of ranks than the layout needs, or the layout cannot be.
    """
    import tio_megatron
    from tio_megatron.checkpoint import Checkpoint
    from tio_megatron.contract.environment import read
    from tio_megatron.contract.words import TrainerLayout
    from tio_megatron.integrations.megatron import cpu_device
    from tio_megatron.integrations.megatron.recording.recorder import record_megatron
    from tio_megatron.integrations.megatron.scoring.tracing import parallel
    from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
    from tio_megatron.integrations.megatron.weights.transfer import load_weights

    world = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = TrainerLayout.parse(layout)
    sizes = chosen.layout
    if world != chosen.ranks:
        start = f"torchrun --nproc-per-node {chosen.ranks} -m tio_megatron record ..."
        raise ValueError(f"{chosen} needs {chosen.ranks} {'rank' if chosen.ranks == 1 else 'ranks'}, there {'is 1' if world == 1 else f'are {world}'}: {start}")
    if stock and sizes.cp > 1:
        raise ValueError("stock megatron-core cuts sequences with Transformer Engine only, which is not recorded; cp1 works, and so does the contract")
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
        stack.enter_context(parallel(sizes))
        config, rules = checkpoint.config, None if stock else read(contract or os.environ.get("TIO_CONTRACT") or "default").contract
        if rules is not None:
            stack.enter_context(tio_megatron.apply(rules, vocab_size=config.shape.vocab))
        rows = padded_vocab(config, sizes, rules)
        fields = {"moe_token_dispatcher_type": chosen.dispatcher} if config.shape.experts else {}
        built = gpt_model(config, transformer_config(config, sizes, calculate_per_token_loss=True, **fields), vocab_size=rows).eval()
        load_weights(built, checkpoint)
        record_megatron(built, config, sequences, folder, **options)

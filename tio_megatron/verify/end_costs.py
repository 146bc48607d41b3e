"""What the two ends of a model send between tensor-parallel ranks: the embedding, and the head with its loss. Once a micro-batch, not in every layer.

Trainer: rows of the embedding move from their owners (stock adds zeros to them); the logits' input gradient is a sum over the vocabulary, whose nodes
travel in fp32; of a token's loss two numbers are gathered and one is summed (stock: three all-reduces). Rollout: the embedding's bytes are stock's, logits
are gathered in fp32 instead of bf16. Legend as in :mod:`.costs`; ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tio_megatron.collectives import bytes_sent
from tio_megatron.contract import Contract, Layout, ModelShape
from tio_megatron.layers.vocab import VocabShard
from tio_megatron.verify.cost import ACTIVATION, PARTIAL, SUM64, Cost

MEGATRON_ROWS, VLLM_ROWS = 128, 64
"""What each pads a rank's rows of the vocabulary (Megatron), or the whole vocabulary (vLLM), to a multiple of."""


def training(contract: Contract, model: ModelShape, layout: Layout, tokens: int) -> Iterator[Cost]:
    """Forward and backward of ``tokens`` tokens (after context parallelism has cut them), which spread evenly over the vocabulary's owners.

    ``per`` is ``first stage`` or ``last stage``: one micro-batch on a rank of that pipeline stage. The gradient of a tied embedding is ``per`` step.
    """
    ranks, size = layout.tp, tokens * model.hidden * ACTIVATION
    rows = -(-model.vocab // (MEGATRON_ROWS * ranks)) * MEGATRON_ROWS
    if ranks > 1:
        ring = (ranks - 1) * size // ranks
        moved = 2 * ring // ranks if layout.sp else ring
        yield Cost("embedding over tensor-parallel ranks", "first stage", moved, 2 * ring, "rows move from their owners, nothing is added")
        shard = VocabShard(contract.vocab_order(model.vocab), rows, 0, ranks)
        nodes, tree = shard.spans, shard.order.tree
        ours = bytes_sent(ranks, tokens * model.hidden, out_dtype=torch.bfloat16, scattered=layout.sp, spans=nodes, leaves=tree.leaves)
        most = max(map(len, nodes))
        why = "partial sums in fp32" + (f", up to {most} nodes of the vocabulary's tree a rank" if most > 1 else "")
        yield Cost("logits' input gradient over tensor-parallel ranks", "last stage", ours, ring if layout.sp else 2 * ring, why)
        loss = (ranks - 1) * 2 * tokens * PARTIAL + bytes_sent(ranks, tokens, spans=nodes, leaves=tree.leaves)
        stock = 3 * 2 * (ranks - 1) * tokens * PARTIAL // ranks
        yield Cost("log-softmax over tensor-parallel ranks", "last stage", loss, stock, "maximum and target are gathered, the sum is the tree's")
    if model.tied and layout.pp > 1:
        count = model.vocab * model.hidden // ranks
        yield Cost("tied embedding's gradient, first and last stage", "step", count * SUM64, count * PARTIAL, "exact 64-bit sums for fp32 ones")


def rollout(model: ModelShape, layout: Layout, tokens: int) -> Iterator[Cost]:
    """One step of ``tokens`` tokens, a row of logits for each."""
    ranks, size = layout.tp, tokens * model.hidden * ACTIVATION
    if ranks == 1:
        return
    ring = 2 * (ranks - 1) * size // ranks
    yield Cost("embedding over ranks", "step", ring, ring, "the same bytes, as integers")
    row = (ranks - 1) * tokens * -(-model.vocab // VLLM_ROWS) * VLLM_ROWS // ranks
    yield Cost("logits, gathered", "step", row * PARTIAL, row * ACTIVATION, "logits are fp32, never rounded")

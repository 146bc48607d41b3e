"""Tiny Qwen3 checkpoints with weights that make every sum matter, for tests of the engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tio_megatron.checkpoint import CheckpointConfig, HeldWeights, tensor_table, write_checkpoint

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": 700,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Several key blocks need sequences above 64; 700 rows of vocabulary pad differently for TP 1, 2 and 4."""

MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_tiny(path: Path, config: dict[str, Any] = DENSE, seed: int = 0, gain: float = 2.0, embedding_std: float = 1.0, **fields: Any) -> Path:
    """Write a checkpoint of ``config`` with ``fields`` replaced: normal weights of a size that keeps activations near 1, norms near 1.

    Args:
        path: folder to make.
        config: :data:`DENSE`, :data:`MOE` or a dictionary like them.
        seed: of the weights.
        gain: size of the matrices, 1.0 keeps a unit input at unit size.
        embedding_std: size of the embedding; where it is tied to the head, that of the logits too.
        fields: of ``config.json``.
    """
    chosen = config | fields
    write_checkpoint(path, chosen, _values(chosen, seed, gain, embedding_std))
    return path


def tiny_weights(config: dict[str, Any] = DENSE, seed: int = 0) -> HeldWeights:
    """The weights that :func:`write_tiny` would write, in memory."""
    return HeldWeights(config, _values(config, seed, 2.0, 1.0))


def _values(config: dict[str, Any], seed: int, gain: float, embedding_std: float) -> Iterator[tuple[str, torch.Tensor]]:
    checked = CheckpointConfig.from_dict(config)
    generator = torch.Generator().manual_seed(seed)
    for name, spec in tensor_table(checked.shape).items():
        values = torch.randn(spec.shape, generator=generator)
        if len(spec.shape) == 1:
            values = 1 + values / 10
        else:
            values = values * (embedding_std if "embed" in name else gain / spec.shape[-1] ** 0.5)
        yield name, values.to(getattr(torch, checked.dtype))


def ragged(lengths: tuple[int, ...] = (170, 1, 65, 97), vocab: int = 700, seed: int = 1) -> list[list[int]]:
    """Token sequences of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]

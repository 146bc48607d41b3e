"""Random checkpoints for the tests: small, but with routing and probabilities that an order of summation can change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tio_megatron.checkpoint import CheckpointConfig, tensor_table, write_checkpoint

VOCABULARY = 700
"""No multiple of 64, 128 or any TP size times those: every layout pads it in another way."""


def config(*, dense: bool = False, dtype: str = "bfloat16", tied: bool = False, layers: int = 2, top_k: int = 4, **fields: Any) -> dict[str, Any]:
    """``config.json`` of a small Qwen3-MoE (16 experts) or dense Qwen3 model."""
    both = {
        "num_hidden_layers": layers,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "intermediate_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "use_sliding_window": False,
        "dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    moe = {
        "num_experts": 16,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} if dense else {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return both | names | ({} if dense else moe) | fields


def tensors(contents: dict[str, Any], seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights by HF name: norms around 1, a gate that spreads tokens over the experts."""
    checked = CheckpointConfig.from_dict(contents)
    generator = torch.Generator().manual_seed(seed)
    for name, spec in tensor_table(checked.shape).items():
        noise = torch.randn(spec.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.2 * noise
        else:
            value = noise * (0.3 if name.endswith("mlp.gate.weight") else 0.06)
        yield name, value.to(getattr(torch, checked.dtype))


def make(folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write a checkpoint into ``folder`` unless it is there; returns the folder."""
    if not (folder / "config.json").exists():
        contents = config(**options)
        write_checkpoint(folder, contents, tensors(contents, seed))
    return folder

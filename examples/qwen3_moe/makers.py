"""Checkpoints made here: ``tiny``, pre-trained by our own Megatron, and ``slice``, the widths of Qwen3-30B-A3B."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tio_megatron.checkpoint import CheckpointConfig, Shard, tensor_table, write_checkpoint

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "decoder_sparse_step": 1,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
}


def tiny_config(layers: int = 4, dtype: str = "bfloat16") -> dict[str, Any]:
    """Hidden 256, 16 experts top-4 of 128, 8 query and 2 key/value heads of 64, 4096 tokens."""
    return _COMMON | {
        "num_hidden_layers": layers,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "torch_dtype": dtype,
    }


def slice_config(layers: int = 1, dtype: str = "bfloat16", *, experts: int = 128, vocab: int = 151936) -> dict[str, Any]:
    """The widths of Qwen3-30B-A3B in fewer layers; training needs fewer experts and tokens to fit in memory."""
    return _COMMON | {
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "torch_dtype": dtype,
    }


def config_key(config: dict[str, Any], *more: object) -> str:
    """12 hex digits over everything a made checkpoint depends on."""
    return hashlib.sha256(json.dumps([config, *map(str, more)], sort_keys=True).encode()).hexdigest()[:12]


def random_tensors(config: CheckpointConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor at random, the same for every layout: norms around 1, products that keep the size of what they are given."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    for name, spec in tensor_table(config.shape).items():
        if len(spec.shape) == 1:
            tensor = 1.0 + 0.1 * torch.randn(spec.shape, generator=generator)
        else:
            spread = 0.02 if spec.shard is Shard.VOCAB else spec.shape[1] ** -0.5
            tensor = torch.randn(spec.shape, generator=generator).mul_(spread)
        yield name, tensor.to(dtype)


def make_random(folder: Path, config: dict[str, Any], seed: int, files: tuple[Path, ...] = ()) -> None:
    """Write a checkpoint of random weights, unless it is there."""
    if not (folder / "config.json").is_file():
        write_checkpoint(folder, config, random_tensors(CheckpointConfig.from_dict(config), seed), files=files)

"""Small checkpoints to read, break and write."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tio_megatron.checkpoint import CheckpointConfig, tensor_table, write_checkpoint

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_MOE_ONLY = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
DENSE = {key: value for key, value in MOE.items() if key not in _MOE_ONLY}
DENSE |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def tensors(config: dict, seed: int = 0):
    """Random tensors for every name of ``config``'s table."""
    checked = CheckpointConfig.from_dict(config)
    generator = torch.Generator().manual_seed(seed)
    for name, spec in tensor_table(checked.shape).items():
        yield name, torch.randn(spec.shape, generator=generator).to(getattr(torch, checked.dtype))


@pytest.fixture(params=["moe", "dense", "tied", "fp32"])
def config(request) -> dict:
    return {"moe": MOE, "dense": DENSE, "tied": MOE | {"tie_word_embeddings": True}, "fp32": DENSE | {"torch_dtype": "float32"}}[request.param]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint folder and gives its path."""

    def build(config: dict = MOE, **options) -> Path:
        write_checkpoint(tmp_path / "model", config, tensors(config), **options)
        return tmp_path / "model"

    return build

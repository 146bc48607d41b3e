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

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


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

"""Qwen3, dense."""

from tio_megatron.contract import ModelShape
from tio_megatron.models import blocks
from tio_megatron.models.description import Architecture

SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
}

SUPPORTED = (
    ("attention_bias", False, False),
    ("mlp_bias", False, False),
    ("use_sliding_window", False, False),
)

PUBLISHED_FACTS = {
    "rope_theta": 1e6,
    "rms_eps": 1e-6,
    "positions": 40960,
    "sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}

MODEL = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    vllm="vllm.model_executor.models.qwen3:Qwen3ForCausalLM",
    sizes=SIZES | {"ffn": "intermediate_size"},
    first=blocks.EMBEDDING,
    attention=blocks.attention(head_norms=True),
    dense=blocks.gated_mlp(),
    last=blocks.HEAD,
    megatron={"qk_layernorm": True},
    supported=SUPPORTED,
    publisher="Qwen",
    published={
        "Qwen3-0.6B": ModelShape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, vocab=151936, ffn=3072, tied=True),
        "Qwen3-8B": ModelShape(layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocab=151936, ffn=12288),
        "Qwen3-32B": ModelShape(layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, vocab=151936, ffn=25600),
    },
    published_facts=PUBLISHED_FACTS,
)

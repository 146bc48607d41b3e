"""Qwen3-MoE: a router chooses some experts of each token by softmax. Checkpoints with some layers without experts are recorded, and not built."""

from tio_megatron.contract import ModelShape
from tio_megatron.models import blocks, qwen3
from tio_megatron.models.description import Architecture

MODEL = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    vllm="vllm.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM",
    # transformers 5 writes num_local_experts, older checkpoints num_experts.
    sizes=qwen3.SIZES | {"experts": ("num_experts", "num_local_experts"), "top_k": "num_experts_per_tok", "moe_ffn": "moe_intermediate_size"},
    first=blocks.EMBEDDING,
    attention=blocks.attention(head_norms=True),
    dense=blocks.gated_mlp(),
    experts=blocks.experts(),
    last=blocks.HEAD,
    megatron={"qk_layernorm": True},
    supported=(*qwen3.SUPPORTED, ("decoder_sparse_step", 1, 1), ("mlp_only_layers", [], [])),
    normalise="norm_topk_prob",
    publisher="Qwen",
    published={
        "Qwen3-30B-A3B": ModelShape(layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=768),
        "Qwen3-235B-A22B": ModelShape(layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=1536),
    },
    published_facts=qwen3.PUBLISHED_FACTS,
)

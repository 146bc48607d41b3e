"""Blocks that most decoders share, under the names of their checkpoints. An architecture with other names or parts passes them, or writes its own block.

A tensor of the checkpoint, Megatron's parameter, vLLM's parameter and the point of a trace stand in one row, and nowhere else in the package.
"""

from __future__ import annotations

from tio_megatron.models.description import Block, Operation, Packing, Parameter, Shard, Tensor

SCALED = ("expert_scaled", "expert_scaled_out")
"""Points of engines that weight a row of an expert before its down projection."""

RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen2MoeRMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")
"""Classes of transformers with a ``weight`` and a ``variance_epsilon`` that are the norm of these blocks; others of that name there add one to the weight,
or gate. A model of transformers that is not described may have them too."""

HF_LAYER = "model.layers.{layer}."
"""What stands before a layer's names, in a checkpoint, in transformers and in vLLM."""

POSITIONS = Operation("positions", "given")

EMBEDDING = Block(
    parameters=(
        Parameter((Tensor("model.embed_tokens.weight", "embed", "VH", Shard.VOCAB),), ("embedding.word_embeddings.weight",), "model.embed_tokens.weight"),
    ),
    operations=(Operation("embed", "embedding"),),
)

HEAD = Block(
    parameters=(
        Parameter((Tensor("model.norm.weight", "final_norm", "H"),), ("decoder.final_layernorm.weight",), "model.norm.weight"),
        Parameter(
            (Tensor("lm_head.weight", "logits", "VH", Shard.VOCAB),), ("output_layer.weight",), "lm_head.weight", axis="vocab", when=lambda m: not m.tied
        ),
    ),
    operations=(
        Operation("final_norm", "norm", ("stream",)),
        Operation("logits", "product", ("final_norm",)),
        Operation("logprob_rows", "logprob", ("logits",)),
        Operation("logprob", "logprob", ("logits",)),
    ),
)
"""A model whose embedding is its head (``tied``) has no tensor of the head: the embedding's makes the logits."""


def attention(*, head_norms: bool) -> Block:
    """Norm, queries, keys and values, rotary positions, attention, output projection, residual sum.

    Args:
        head_norms: every query and key head is normalised.
    """
    normed = "qk" if head_norms else ""
    turned = "norm" if head_norms else "proj"
    return Block(
        parameters=(
            Parameter(
                (Tensor("input_layernorm.weight", "attn_norm", "H"),),
                ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
                "input_layernorm.weight",
            ),
            Parameter(
                tuple(Tensor(f"self_attn.{which}_proj.weight", f"{which}_proj", axes, Shard.COLUMN) for which, axes in (("q", "QH"), ("k", "KH"), ("v", "KH"))),
                ("self_attention.linear_qkv.weight",),
                "self_attn.qkv_proj.weight",
                Packing.GROUPED,
                axis="col_dgrad",
                label="qkv",
            ),
            *(_head_norm(which) for which in normed),
            Parameter(
                (Tensor("self_attn.o_proj.weight", "o_proj", "HQ", Shard.ROW),),
                ("self_attention.linear_proj.weight",),
                "self_attn.o_proj.weight",
                axis="attn_row",
                label="attention output",
            ),
        ),
        operations=(
            Operation("attn_norm", "norm", ("stream",)),
            *(Operation(f"{which}_proj", "product", ("attn_norm",)) for which in "qkv"),
            *(Operation(f"{which}_norm", "norm", (f"{which}_proj",)) for which in normed),
            *(Operation(f"{which}_rope", "rope", (f"{which}_{turned}", "positions")) for which in "qk"),
            Operation("attn", "attention", ("q_rope", "k_rope", "v_proj")),
            Operation("o_proj", "product", ("attn",)),
            Operation("attn_residual", "add", ("stream", "o_proj")),
        ),
        vllm_modules={"attn": "self_attn.attn"},
    )


def gated_mlp() -> Block:
    """Norm, gate and up, silu(gate) * up, down projection, residual sum."""
    return Block(
        parameters=(
            _mlp_norm("mlp.linear_fc1.layer_norm_weight"),
            Parameter(
                tuple(Tensor(f"mlp.{which}_proj.weight", f"{which}_proj", "IH", Shard.COLUMN) for which in ("gate", "up")),
                ("mlp.linear_fc1.weight",),
                "mlp.gate_up_proj.weight",
                Packing.STACKED,
                axis="col_dgrad",
                label="gate and up",
            ),
            Parameter(
                (Tensor("mlp.down_proj.weight", "mlp_out", "HI", Shard.ROW),),
                ("mlp.linear_fc2.weight",),
                "mlp.down_proj.weight",
                axis="mlp_row",
                label="MLP output",
            ),
        ),
        operations=(
            Operation("mlp_norm", "norm", ("attn_residual",)),
            *(Operation(f"{which}_proj", "product", ("mlp_norm",)) for which in ("gate", "up")),
            Operation("act", "swiglu", ("gate_proj", "up_proj")),
            Operation("mlp_out", "product", ("act",)),
            Operation("mlp_residual", "add", ("attn_residual", "mlp_out")),
        ),
        modules={"mlp_out": "mlp"},
        vllm_modules={"act": "mlp.act_fn"},
    )


def experts() -> Block:
    """Norm, router, each token's experts (gated MLPs), their weighted sum, residual sum."""
    here = "mlp.experts.{expert}."
    return Block(
        parameters=(
            _mlp_norm(),
            Parameter((Tensor("mlp.gate.weight", "router_logits", "EH"),), ("mlp.router.weight",), "mlp.gate.weight"),
            Parameter(
                tuple(Tensor(f"{here}{which}_proj.weight", f"expert_{which}", "MH", Shard.COLUMN) for which in ("gate", "up")),
                ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
                "mlp.experts.routed_experts.w13_weight",
                Packing.STACKED,
                axis="expert_col_dgrad",
                transformers="mlp.experts.gate_up_proj",
            ),
            Parameter(
                (Tensor(f"{here}down_proj.weight", "expert_out", "HM", Shard.ROW),),
                ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
                "mlp.experts.routed_experts.w2_weight",
                axis="expert_row",
                transformers="mlp.experts.down_proj",
            ),
        ),
        operations=(
            Operation("mlp_norm", "norm", ("attn_residual",)),
            Operation("router_logits", "product", ("mlp_norm",)),
            Operation("expert_ids", "top_k", ("router_logits",)),
            Operation("expert_probs", "routing", ("router_logits", "expert_ids")),
            *(Operation(f"expert_{which}", "expert_product", ("mlp_norm", "expert_ids")) for which in ("gate", "up")),
            Operation("expert_act", "swiglu", ("expert_gate", "expert_up")),
            # Two ways to weight a row: before its down projection (stock Megatron) or behind it (everybody else). An engine has one of them.
            Operation("expert_scaled", "scaling", ("expert_act", "expert_probs")),
            Operation("expert_scaled_out", "expert_product", ("expert_scaled", "expert_ids"), "expert_out"),
            Operation("expert_out", "expert_product", ("expert_act", "expert_ids")),
            Operation("mlp_out", "combine", ("expert_scaled_out", "expert_out", "expert_probs", "expert_ids")),
            Operation("mlp_residual", "add", ("attn_residual", "mlp_out")),
        ),
        modules={"mlp_out": "mlp", "expert_ids": "mlp.experts"},
    )


def _head_norm(which: str) -> Parameter:
    name = f"self_attn.{which}_norm.weight"
    return Parameter((Tensor(name, f"{which}_norm", "D"),), (f"self_attention.{which}_layernorm.weight",), name)


def _mlp_norm(*fused: str) -> Parameter:
    """Before an MLP; ``fused`` is its name inside Transformer Engine's first linear layer."""
    name = "post_attention_layernorm.weight"
    return Parameter((Tensor(name, "mlp_norm", "H"),), ("pre_mlp_layernorm.weight", *fused), name)

"""Every option that MindSpeed adds, and what becomes of it under a contract: harmless, mapped to what we do, or refused by name.

The table is complete for MindSpeed core_r0.16.0; ``make test-mindspeed`` compares it with the options that the real sources register. An option
that it does not know is refused unless it has its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tio_megatron.findings.finding import OFF, Finding, Rule

Verdict = Literal["harmless", "mapped", "refused"]


@dataclass(frozen=True)
class Option:
    """One option of MindSpeed.

    Args:
        name: as in its arguments.
        verdict: ``harmless``: no sum of our models depends on it. ``mapped``: what it asks for is done by our own parts. ``refused``.
        why: one line, read by users.
        works: the values that are taken; ``None``: all of them.
        asked: by MindSpeed, and not an argument that it adds itself but one of Megatron's.
    """

    name: str
    verdict: Verdict
    why: str
    works: tuple[Any, ...] | None = None
    asked: bool = False

    def broken_by(self, source: Any) -> Finding | None:
        """What is found if ``source`` (arguments, or a configuration that MindSpeed has put them in) has a value that is not taken."""
        return None if self.works is None else Rule(self.name, self.works, self.why).broken_by(source)


def _harmless(why: str, *names: str) -> list[Option]:
    return [Option(name, "harmless", why) for name in names]


def _refused(why: str, *names: str, works: tuple[Any, ...] = OFF) -> list[Option]:
    return [Option(name, "refused", why, works) for name in names]


_OURS = "the model's part is the contract's own, whatever this says"
_COMPANION = "only read together with an option that is refused"

OPTIONS: tuple[Option, ...] = (
    # Fused operators.
    Option("use_flash_attn", "mapped", f"attention: {_OURS}; MindSpeed's patch of DotProductAttention.forward stays in force for other models", asked=True),
    Option("use_fused_rmsnorm", "mapped", f"norms: {_OURS}"),
    Option("use_fused_swiglu", "mapped", f"activation: {_OURS}"),
    Option("use_fused_rotary_pos_emb", "mapped", f"rotation: {_OURS}"),
    Option("use_fused_moe_token_permute_and_unpermute", "refused", "our dispatchers move rows themselves, and it turns moe_permute_fusion on", OFF),
    Option("use_fused_ring_attention_update", "mapped", "no partial softmaxes are merged, so there is nothing to update"),
    Option("sparse_mode", "mapped", f"attention: {_OURS}; causal", (0, 2)),
    Option("pre_tockens", "refused", "it is a sliding window", (65536, 2147483647)),
    Option("next_tockens", "refused", "it shows later tokens", (0,)),
    Option("use_fusion_attn_v2", "mapped", f"attention: {_OURS}"),
    Option("use_flash_attn_npu_batch_invariant", "mapped", f"attention: {_OURS}"),
    *_refused("it replaces torch's operators in the whole process by ones with their own order", "use_batch_invariant_ops"),
    *_refused("alibi has no kernel", "square_alibi_mask", "fill_neg_inf", "alibi_fusion_attn_type", "alibi_diagonal_opposite"),
    Option("reset_attention_mask", "refused", "ends of documents inside a sample are not seen; pack samples with packed_seq_params", OFF, asked=True),
    Option("reset_position_ids", "refused", "ends of documents inside a sample are not seen; pack samples with packed_seq_params", OFF, asked=True),
    # Context parallelism: see :mod:`.context`.
    Option("context_parallel_algo", "mapped", "keys move by all-to-all or all-gather; with cp above 1 only megatron_cp_algo and kvallgather_cp_algo are taken"),
    Option("cp_window_size", "mapped", "inner rings only order messages, and we send none in a ring"),
    Option("use_cp_send_recv_overlap", "mapped", "there is no ring to overlap"),
    Option("megatron_cp_in_bnsd", "mapped", "a memory layout of the ring"),
    Option("attention_mask_type", "refused", "it cuts sequences in slices for masks that are not causal", (None, "causal")),
    Option("context_parallel_kv_cache_policy", "mapped", "which keys the ring keeps for the backward pass; ours are kept"),
    Option("context_parallel_cache_interval", "mapped", "which keys the ring keeps for the backward pass; ours are kept"),
    Option("use_ulysses_allgather_kv", "mapped", "we gather keys wherever heads do not divide"),
    *_harmless(_COMPANION, "ulysses_degree_in_cp", "attention_mask_on_cpu", "adaptive_cp_without_coarse", "adaptive_cp_dynamic_attn_mask"),
    *_harmless(_COMPANION, "adaptive_cp_only_reschedule", "adaptive_cp_manually_set_mask_list", "use_naive_l2norm"),
    # Tensor parallelism.
    *_refused("products cut in two dimensions sum in another order", "tp_2d"),
    *_harmless(_COMPANION, "tp_x", "tp_y", "enable_overlap_ag_with_matmul", "enable_overlap_matmul_with_rs", "enable_backward_overlap_ag_with_matmul"),
    *_refused("its fused product and collective sum in their own order", "use_ascend_mc2", "use_ascend_coc"),
    *_harmless(_COMPANION, "coc_mode", "coc_parallel_num", "coc_fused_kernel"),
    *_refused("cuts that do not fall on leaves", "unaligned_linear"),
    # Experts.
    *_refused("that schedule calls steps of stock's expert layer directly", "moe_fb_overlap", "moe_unperm2_mem_optim_swap"),
    *_refused("its expert layer takes the place of ours, with sums of its own", "moe_alltoall_overlap_comm", "moe_allgather_overlap_comm"),
    *_refused("its dispatcher adds in an order of its own", "moe_tp_extend_ep", "balanced_moe_experts", "enable_expert_placement"),
    *_refused("its expert layer recomputes with products of its own", "moe_zero_memory", works=("disable", None)),
    *_harmless(_COMPANION, "moe_permutation_async_comm", "moe_zero_memory_num_layers", "balanced_moe_hot_expert_num", "trans_hot_expert_group_num"),
    *_harmless(_COMPANION, "expert_placement_freq", "enable_fine_grained_expert_placement", "fine_grained_expert_placement_thre"),
    *_refused("it counts inside stock's router", "print_expert_load"),
    *_refused("use moe_shared_expert_intermediate_size", "n_shared_experts", works=(None, 0)),
    Option("gemm_gradient_accumulation_fusion", "mapped", "our products add their gradients to integer sums in any case"),
    # Gradients, optimizer, memory.
    Option("optimizer_selection", "mapped", "Adam is ours wherever one is read", ("fused_adamw", "fused_torch_adamw", None)),
    *_harmless(_COMPANION, "ema_decay"),
    *_refused("gradients and optimizer states are not quantized", "quant_states", "quant_grads"),
    *_refused("it rebuilds fp32 weights from bf16 ones and their remainders outside our optimizer", "reuse_fp32_param"),
    *_refused("its optimizer class takes the place of stock's, which ours is built for", "swap_optimizer", "virtual_optimizer"),
    *_harmless("how many pieces swap_optimizer moves, which is refused", "swap_optimizer_times"),
    *_refused("it allocates gradients itself, without room for integer sums", "param_and_grad_buffer_pad"),
    *_refused("it shards weights in another way than DDP", "layerzero", "layerzero_config", "fsdp2_config_path"),
    *_refused("its DDP is not the one whose gradients are integer sums", "reset_bucket_group_order"),
    *_refused("it swaps what stock's linear layers save; ours save other tensors", "swap_attention", "smart_swap"),
    *_harmless(_COMPANION, "swap_modules"),
    *_refused("its recomputation calls stock's layers directly; Megatron's recompute_granularity works", "recompute_activation_function", "recompute_norm"),
    *_harmless(_COMPANION, "recompute_activation_function_num_layers", "recompute_norm_num_layers"),
    *_harmless("which layers are recomputed", "enable_recompute_layers_per_pp_rank"),
    *_refused("it compresses activations", "compress_dense", works=("disable", None)),
    # Pipeline.
    *_refused("its schedule takes the place of the one that watches a training step", "recompute_in_bubble", "recompute_in_advance", "optimize_send_recv_comm"),
    *_refused("its schedule takes the place of the one that watches a training step", "schedules_method", "use_multiparameter_pipeline_model_parallel"),
    *_harmless(_COMPANION, "dualpipev_dw_detach"),
    *_refused("layers that do nothing and stages of unequal layers are not tested", "noop_layers", "pipeline_num_transformer_layers"),
    *_harmless("shapes travel between pipeline stages", "variable_seq_lengths"),
    *_refused("its trainer has parts of a model in different processes", "dist_train"),
    *_refused("its search starts runs of its own", "auto_settings", "automated_pipeline", "automated_pipeline_perf", "recompute_module_list"),
    *_refused("MindSpore has no kernels here", "ai_framework", works=("pytorch", None)),
    # Other models, FP8.
    *_refused("latent attention is not supported", "multi_head_latent_attention", "qk_rope_head_dim", "qk_nope_head_dim", works=(False, None)),
    *_refused("sparse attention is not supported", "use_dsa_absorb", "use_fused_lightning_indexer", "use_fused_sparse_flash_attention"),
    *_refused("sparse attention is not supported", "use_fused_lightning_indexer_kl_loss", "apply_rope_in_complex"),
    *_harmless("only read for FP8, which is refused", "use_gmm_fp8", "te_comparison_with_cpu", "te_comparison_with_bf16"),
    # No part in a sum.
    *_harmless("which groups of patches are there at all", "optimization_level"),
    *_harmless("settings of torch's random state and of vendor operators that we do not sum with", "npu_deterministic"),
    *_harmless("buffers of communication; bytes are only moved", "hccl_group_buffer", "hccl_group_buffer_adaptive", "hccl_ep_group_buffer_adaptive_factor"),
    *_harmless("buffers of communication; bytes are only moved", "hccl_op_mode", "hccl_slice_size"),
    *_refused("scores and checkpoints use groups on the CPU", "disable_gloo_group"),
    *_harmless("what is logged", "async_log_allreduce", "op_cal_tflops", "profile_level", "profile_with_cpu", "profile_with_stack", "profile_with_memory"),
    *_harmless("what is logged", "profile_record_shapes", "profile_save_path", "auto_settings_log_level", "prof_file"),
    *_harmless("data", "tokenizer_name_or_path", "tokenizer_not_use_fast"),
    *_harmless("where processes run", "auto_settings_work_dir", "auto_settings_ranks", "auto_settings_type", "target_nnodes", "nnodes", "nproc_per_node"),
    *_harmless("where processes run", "node_rank", "master_addr", "master_port"),
    *_harmless("compilation of vendor operators", "jit_compile"),
)

NAMES = {option.name: option for option in OPTIONS}


def problems(*sources: Any) -> list[Finding]:
    """What is found of every option of MindSpeed that a contract cannot obey; the first source that breaks a rule is quoted.

    Args:
        sources: a model's configuration, and the arguments that MindSpeed reads.
    """
    found: dict[str, Finding] = {}
    for source in sources:
        for option in OPTIONS:
            finding = option.broken_by(source)
            if finding is not None:
                found.setdefault(option.name, finding)
    return list(found.values())


def unknown(source: Any, defaults: Any) -> Iterator[Finding]:
    """What is found of every option of ``defaults`` that the table does not know and that ``source`` has changed."""
    for name, default in vars(defaults).items():
        if name not in NAMES and getattr(source, name, default) != default:
            yield Finding("an option of MindSpeed that is not known here", f"{default!r} would work", name, getattr(source, name))


def rows(verdict: Verdict, options: Iterable[Option] = OPTIONS) -> list[Option]:
    """The options with one verdict, for the documents and their test."""
    return [option for option in options if option.verdict == verdict]

"""Settings of the stock packages that move a number between two runs, for people without the plug-in: what helps, what breaks, what is neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tio_megatron.findings.finding import Finding, Level
from tio_megatron.verify.doctor.options import OFF, written
from tio_megatron.verify.doctor.running import Running


@dataclass(frozen=True)
class Instead:
    """A value of the same option, which is written as the run's reader takes it."""

    value: Any


@dataclass(frozen=True)
class Effect:
    """``option`` with one of ``values`` (None: any that is on) does what ``why`` says; ``works`` is what would not, or the value that would not."""

    option: str
    values: tuple[Any, ...] | None
    why: str
    works: str | Instead
    level: Level = "note"


TRAINER = (
    Effect("hidden_dropout", None, "a trainer with dropout on has other log-probabilities than any rollout", Instead(0), "bad"),
    Effect("attention_dropout", None, "a trainer with dropout on has other log-probabilities than any rollout", Instead(0), "bad"),
    Effect("fp8", None, "quantized products round where the rollout does not", "leave it out", "bad"),
    Effect("moe_expert_capacity_factor", None, "tokens above the capacity are dropped, and the rollout drops none", "leave it out", "bad"),
    Effect("moe_router_dtype", (None,), "router logits are rounded to bf16; vLLM's too or not, by release: experts flip where they tie", Instead("fp32")),
    Effect("tensor_model_parallel_size", None, "row-parallel sums are partial sums in bf16, added by NCCL in its order", "the contract, or TP 1 on both sides"),
    Effect("sequence_parallel", None, "the same sums as reduce-scatters, in another order than an all-reduce's", "the contract"),
    Effect("moe_token_dispatcher_type", ("allgather",), "a token's experts are added over ranks, in the order of ranks", "alltoall"),
    Effect("moe_permute_fusion", None, "the fused kernel adds a token's experts in its own order", "leave it out"),
    Effect("moe_router_fusion", None, "the fused router has another softmax than vLLM's", "leave it out"),
    Effect(
        "transformer_impl",
        ("transformer_engine",),
        "its norms, attention and products have orders and roundings that vLLM does not share",
        "local, or the contract",
    ),
    Effect(
        "attention_backend", ("auto", "flash"), "the kernel and its split of the keys are chosen by shape; vLLM's paged kernel splits otherwise", "the contract"
    ),
    Effect("apply_rope_fusion", None, "the fused rotation rounds once where others round twice", Instead(False)),
    Effect("masked_softmax_fusion", None, "the fused softmax has its own order; used by the local implementation only", Instead(False)),
    Effect("cross_entropy_loss_fusion", None, "the fused loss sums the vocabulary in its own order", "leave it out"),
    Effect(
        "gradient_accumulation_fusion",
        None,
        "weight gradients are added by micro-batch into fp32: other bytes for another cut",
        Instead(False),
    ),
    Effect("tp_comm_overlap", None, "products are cut into pieces that are added as they come", "leave it out"),
    Effect("deterministic_mode", (False,), "the backward pass may add with atomics: other bytes from run to run", Instead(True)),
)
ROLLOUT = (
    Effect("quantization", None, "quantized products round where the trainer does not", "an unquantized checkpoint", "bad"),
    Effect("kv_cache_dtype", ("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), "keys and values are rounded once more than the trainer's", "auto", "bad"),
    Effect(
        "tensor_parallel_size", None, "row-parallel sums are partial sums in bf16, added in the order of the all-reduce", "the contract, or TP 1 on both sides"
    ),
    Effect("enable_prefix_caching", None, "a cached prefix was computed in another batch: other sums than without a hit", "enable_prefix_caching False"),
    Effect("enable_chunked_prefill", None, "a prompt is cut where the batch is full: other kernels and sums", "a max_num_batched_tokens above every prompt"),
    Effect("disable_cascade_attn", (False,), "requests that share a prefix merge two softmaxes, others do not", "leave it as it is (True)", "bad"),
    Effect("enforce_eager", (False,), "compiled graphs fuse norms and activations: one rounding fewer than in the trainer", "enforce_eager True"),
    Effect("async_scheduling", (True,), "changes which requests share a batch, nothing else", ""),
    Effect("max_num_seqs", None, "the batch's size chooses kernels and their split of K: a token's sums move with its neighbours", "the contract"),
    Effect("max_num_batched_tokens", None, "as max_num_seqs", ""),
)


def check(trainer: Running, rollout: Running) -> Iterator[Finding]:
    """Every effect that is in force. One size or less, and whatever is off, has none."""
    for side, run, effects in (("trainer", trainer, TRAINER), ("rollout", rollout, ROLLOUT)):
        for effect in effects:
            if effect.option not in run:
                continue
            value = run[effect.option]
            on = value in effect.values if effect.values is not None else value not in OFF and value not in (1, "auto") or value is True
            if on:
                works = written(run.kind, effect.option, effect.works.value) if isinstance(effect.works, Instead) else effect.works
                yield Finding(effect.why, works, effect.option, value, side, run.origin(effect.option), level=effect.level)

"""Settings of either side that the contract does not cover, found before anything is started: as they will be, defaults included."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from tio_megatron.integrations.vllm import refused_options
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.running import Running, dtype
from tio_megatron.verify.doctor.spelling import DDP_OVERRIDES, FLAGS, OPTIMIZER_OVERRIDES, OVERRIDES, written

TOPIC = "options"
BLOCK = 64
"""Keys in one block of the attention walk of the cpu family; a page holds whole blocks."""

OFF = (None, False, 0, 0.0, "", "none", "None", "null")


def trainer(run: Running, *, training: bool = True) -> Iterator[Finding]:
    """The trainer's settings against the rules by which a model, its data parallelism and its optimizer are refused when they are built.

    Args:
        run: as it will run; in words nothing is known.
        training: the optimizer and the gradients count too.
    """
    if run.kind == "words":
        yield Finding("note", TOPIC, "trainer: a layout in words says nothing about options", "give the launch script or its arguments to have them looked at")
        return
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        yield Finding("unknown", TOPIC, "megatron-core is not installed here: the trainer's options were not looked at", "run it where the trainer runs")
        return
    from tio_megatron.integrations.megatron_lm.defaults import IMPLIED, SCRIPT_RULES

    implied = {one.option for one in IMPLIED}
    seen: set[str] = set()
    for rule in (*_rules(training), *(SCRIPT_RULES if run.kind == "megatron-lm" else ())):
        if rule.option in seen or rule.option not in run or rule.option in ("params_dtype", "activation_func", "fp8_recipe") or rule.option.endswith("_dtype"):
            continue
        value = run[rule.option]
        if rule.option in implied and rule.option not in run.written:
            continue  # Megatron-LM's default, which the plug-in changes in its scripts; what is written is refused
        seen.add(rule.option)
        works = [work for work in rule.works if not callable(work)]
        if not any(value == work or (work in OFF and value in OFF) for work in works):
            yield _bad(run, rule.option, rule.why, works)
    if run.get("moe_router_dtype") not in (*OFF, "fp32"):
        yield _bad(run, "moe_router_dtype", "router logits are fp32", ["fp32"])
    yield from _balance(run)
    if training and dtype(run) == "bfloat16" and run.get("grad_reduce_in_fp32") is False:
        yield _bad(run, "grad_reduce_in_fp32", "gradients would be rounded to bf16 before they are added", [True])
    if training and run.kind == "verl" and run["calculate_per_token_loss"] in OFF:
        yield _bad(run, "calculate_per_token_loss", "a mean in each micro-batch depends on the cut, and the start is refused", [True])
    if run.get("virtual_pipeline_model_parallel_size") not in OFF or run.get("num_layers_per_virtual_pipeline_stage") not in OFF:
        yield Finding(
            "bad",
            TOPIC,
            "trainer: virtual pipeline stages are not handled by weight export and checkpoints",
            "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null" if run.kind == "verl" else "leave it out",
        )


def _rules(training: bool) -> tuple[Any, ...]:
    from tio_megatron.integrations.megatron.moe_refusals import MOE_RULES
    from tio_megatron.integrations.megatron.optimizer_refusals import DDP_RULES, OPTIMIZER_RULES
    from tio_megatron.integrations.megatron.refusals import CONFIG_RULES, MODEL_RULES

    return (*CONFIG_RULES, *MOE_RULES, *MODEL_RULES, *(DDP_RULES + OPTIMIZER_RULES if training else ()))


def _places(run: Running) -> dict[str, str]:
    """Where verl takes what the rules name."""
    from tio_megatron.integrations.megatron.moe_refusals import MOE_RULES
    from tio_megatron.integrations.megatron.optimizer_refusals import DDP_RULES, OPTIMIZER_RULES
    from tio_megatron.integrations.megatron.refusals import CONFIG_RULES

    found = {rule.option: OPTIMIZER_OVERRIDES for rule in OPTIMIZER_RULES} | {rule.option: DDP_OVERRIDES for rule in DDP_RULES}
    model = {rule.option for rule in (*CONFIG_RULES, *MOE_RULES)} | {"moe_router_dtype", "calculate_per_token_loss"}
    laid = run.get("override_transformer_config", ())
    return found | {option: OVERRIDES for option in model if option not in found or option in laid} | {"optimizer": "actor_rollout_ref.actor.optim"}


def _bad(run: Running, option: str, why: str, works: list[Any]) -> Finding:
    said = " or ".join(map(repr, works))
    if works and run.kind == "megatron-lm" and (option in FLAGS or (works[0] in OFF and run[option] is True)):
        said = written(run.kind, option, works[0])
    elif works and run.kind == "verl" and (place := _places(run).get(option)):
        said = written(run.kind, option, works[0], place)
    return Finding("bad", TOPIC, f"trainer: {option} = {run[option]!r}{run.origin(option)}: {why}", said if said.startswith("leave ") else f"{said} would work")


def _balance(run: Running) -> Iterator[Finding]:
    kinds, weight = run.get("moe_router_load_balancing_type"), run.get("moe_aux_loss_coeff")
    for kind, one in zip(*(value if isinstance(value, list) else [value] for value in (kinds, weight)), strict=False):
        if kind not in (None, "none", "seq_aux_loss") and (one not in OFF or kind == "sinkhorn"):
            what = f"trainer: moe_router_load_balancing_type = {kind!r}{run.origin('moe_router_load_balancing_type')}: its value depends on the micro-batch"
            yield Finding("bad", TOPIC, what, f"seq_aux_loss, or {written(run.kind, 'moe_aux_loss_coeff', 0)}, would work")


ROLLOUT = {
    "quantization": ("quantized products have no fixed order", "an unquantized checkpoint"),
    "enable_lora": ("adapters are not covered", "merge the adapter into the checkpoint"),
    "speculative_config": ("speculative decoding is not covered", "leave it out"),
    "spec_method": ("speculative decoding is not covered", "leave it out"),
    "spec_model": ("speculative decoding is not covered", "leave it out"),
    "spec_tokens": ("speculative decoding is not covered", "leave it out"),
    "enable_eplb": ("expert load balancing moves experts between ranks", "leave it out"),
    "enable_dbo": ("dual batch overlap is not covered", "leave it out"),
    **refused_options.MODEL_SWITCHES,
    "kv_transfer_config": ("keys and values from elsewhere are not covered", "leave it out"),
}
"""vLLM arguments that must be off: why, and what works."""
SIZES = ("pipeline_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
"""Of vLLM and of verl's rollout, that must be 1."""


def rollout(run: Running, checkpoint: str = "bfloat16", positions: int | None = None) -> Iterator[Finding]:
    """vLLM's settings against what an engine is refused by when it is built.

    Args:
        run: as it will run.
        checkpoint: element type of the weights in the folder.
        positions: ``max_position_embeddings`` of the model, where it is known.
    """
    if run.kind == "words":
        yield Finding("note", TOPIC, "rollout: a layout in words says nothing about options", "give vLLM's arguments to have them looked at")
        return
    if run.kind == "verl" and run.get("name", "vllm") != "vllm":
        yield Finding("bad", TOPIC, f"rollout: verl's rollout is {run['name']!r}: only vLLM has layers here", "actor_rollout_ref.rollout.name=vllm")
    for name, (why, works) in ROLLOUT.items():
        written = [key for key in sorted(run.written) if key.startswith(f"{name}.")]  # --speculative-config.model x
        for key in [name] if run.get(name) not in OFF else written[:1]:
            yield Finding("bad", TOPIC, f"rollout: {key} = {run[key]!r}: {why}", works)
    for name in SIZES:
        if run.get(name) not in (*OFF, 1):
            more = "; start one engine per replica" if name == "data_parallel_size" else ""
            yield Finding("bad", TOPIC, f"rollout: {name} = {run[name]!r} is not covered", f"1 would work{more}")
    if run.get("expert_placement_strategy", "linear") != "linear":
        yield Finding("bad", TOPIC, f"rollout: expert_placement_strategy = {run['expert_placement_strategy']!r}: experts must be dealt out in runs", "linear")
    if run.get("disable_cascade_attn") is False:
        yield Finding(
            "bad", TOPIC, "rollout: cascade attention merges two partial softmaxes where requests share a prefix", "leave disable_cascade_attn as it is (True)"
        )
    if run.get("load_format") not in ("auto", "hf", "safetensors", "pt", "dummy"):
        yield Finding("bad", TOPIC, f"rollout: load_format = {run['load_format']!r} is not covered", "auto would work")
    computed = computes_in(run, checkpoint)
    if refused_options.cache_dtype(kept := str(run.get("kv_cache_dtype", "auto")), computed) is not None:
        yield Finding("bad", TOPIC, f"rollout: kv_cache_dtype = {kept!r}: keys and values of {computed} would be kept in another type", "auto would work")
    longest = whole_number(run.get("max_model_len"))
    if positions is not None and longest is not None and (line := refused_options.positions(longest, positions)) is not None:
        yield Finding("bad", TOPIC, f"rollout: {line}", f"at most {positions} would work")
    if str(run["dtype"]) not in ("auto", "bfloat16", "float32"):
        yield Finding("bad", TOPIC, f"rollout: dtype = {run['dtype']!r}", "bfloat16 or float32, the trainer's, would work")
    if run["dtype"] == "auto" and checkpoint == "float32":
        what = f"rollout: dtype = 'auto'{run.origin('dtype')}: the checkpoint is float32, and vLLM would compute it in bfloat16"
        yield Finding("bad", TOPIC, what, "dtype float32, or bfloat16 where the trainer uses that too")
    block = run.get("block_size")
    if isinstance(block, int) and block % BLOCK:
        yield Finding("bad", TOPIC, f"rollout: block_size = {block}: a page must hold whole blocks of keys", f"a multiple of {BLOCK} would work")


TYPES = {"float": "float32", "half": "float16"}
"""vLLM's other names of element types."""


def computes_in(run: Running, checkpoint: str) -> str:
    """The element type that vLLM computes in, for weights of type ``checkpoint``: ``auto`` turns float32 into bfloat16."""
    asked = str(run["dtype"])
    if asked == "auto":
        asked = "bfloat16" if checkpoint == "float32" else checkpoint
    return TYPES.get(asked, asked)


def whole_number(value: Any) -> int | None:
    """A size as vLLM's command line takes it, ``k`` a thousand and ``K`` 1024; None for ``auto`` and what is no size.

    >>> [whole_number(value) for value in (4096, "40k", "2.5k", "64K", "auto", -1, None)]
    [4096, 40000, 2500, 65536, None, None, None]
    """
    if type(value) is int:
        return value if value >= 0 else None
    found = re.fullmatch(r"(\d+)(\.\d+)?([kKmMgGtT])", value.strip()) if isinstance(value, str) else None
    if found is None:
        return None
    power = "kmgt".index(found[3].lower()) + 1
    if found[3].isupper():
        return None if found[2] else int(found[1]) * 1024**power
    return int(float(found[1] + (found[2] or "")) * 1000**power)

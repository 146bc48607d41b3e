"""Settings of either side against the rows by which the engines refuse at their start, before anything is started: as they will be, defaults included."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tio_megatron.findings.finding import Finding, Rule, broken
from tio_megatron.integrations.mindspeed import options as mindspeed
from tio_megatron.integrations.mindspeed.context import refusal
from tio_megatron.integrations.option_facts import options
from tio_megatron.integrations.verl.refusals import TREE
from tio_megatron.integrations.vllm import refused_options
from tio_megatron.verify.doctor.models import Model
from tio_megatron.verify.doctor.running import CORE_NAMES, Kind, Running, dtype, mapping_of

OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", "none", "None", "null", "{}", "[]", {}, [])
OVERRIDES = f"{TREE}.actor.megatron.override_transformer_config"
"""Where verl takes fields of megatron-core's ``TransformerConfig``."""
DDP_OVERRIDES = f"{TREE}.actor.megatron.override_ddp_config"
OPTIMIZER_OVERRIDES = f"{TREE}.actor.optim.override_optimizer_config"


def trainer(run: Running, *, training: bool = True) -> Iterator[Finding]:
    """The trainer's settings against the rules by which a model, its data parallelism and its optimizer are refused when they are built.

    Args:
        run: as it will run; in words nothing is known.
        training: the optimizer and the gradients count too.
    """
    if run.kind == "words":
        yield Finding("a layout in words says nothing about options", "give its arguments, or tio doctor --run", side="trainer", level="note")
        return
    yield from _of_mindspeed(run)
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        yield Finding("megatron-core is not installed here: the trainer's options were not looked at", "run it where it runs", side="trainer", level="unknown")
        return
    from tio_megatron.integrations.megatron.applied.moe_refusals import balancing
    from tio_megatron.integrations.megatron.training.optimizer_refusals import BF16_RULES
    from tio_megatron.integrations.megatron_lm.defaults import IMPLIED

    implied = {one.option for one in IMPLIED} - run.written if run.kind == "megatron-lm" else set()  # defaults that the plug-in changes
    for rules, place in tables(training, run.kind):
        held = {rule.option: _as_off(run[rule.option], rule) for rule in rules if rule.option in run and _judged_here(rule) and rule.option not in implied}
        for finding in broken(rules, held):
            yield _said(run, finding, place if finding.option not in run.get("override_transformer_config", ()) else OVERRIDES)
    kind, weight = (run.get(name) for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"))
    if not {"moe_router_load_balancing_type", "moe_aux_loss_coeff"} & set(run.left):
        for finding in balancing(kind, 0.0 if weight is None else weight, per_token_loss=True):
            yield replace(finding, side="trainer", origin=run.origin(finding.option))
    if training and dtype(run) == "bfloat16":
        yield from (_said(run, finding, DDP_OVERRIDES) for finding in broken(BF16_RULES, run))
    if training and run.kind == "verl":
        rule = Rule("calculate_per_token_loss", (True,), "a mean in each micro-batch depends on the cut, and the start is refused")
        yield from (_said(run, finding, OVERRIDES) for finding in broken([rule], run))
    for name in ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"):
        if run.get(name) not in OFF:
            works = f"{TREE}.actor.megatron.{name}=null" if run.kind == "verl" else "leave it out"
            yield Finding("virtual pipeline stages are not handled by weight export and checkpoints", works, name, run[name], side="trainer")


def tables(training: bool = True, kind: Kind = "megatron-lm") -> list[tuple[tuple[Rule, ...], str]]:
    """The rows for a trainer, and where verl takes what they name; the first row of an option holds."""
    from tio_megatron.integrations.megatron.applied.moe_refusals import MOE_RULES
    from tio_megatron.integrations.megatron.applied.refusals import CONFIG_RULES, MODEL_RULES
    from tio_megatron.integrations.megatron.training.optimizer_refusals import DDP_RULES, OPTIMIZER_RULES
    from tio_megatron.integrations.megatron_lm.defaults import SCRIPT_RULES

    found, seen = [], set[str]()
    rows = [(CONFIG_RULES, OVERRIDES), (MOE_RULES, OVERRIDES), (MODEL_RULES, OVERRIDES)]
    rows += [(OPTIMIZER_RULES, OPTIMIZER_OVERRIDES), (DDP_RULES, DDP_OVERRIDES)] if training else []
    for rules, place in rows + ([(SCRIPT_RULES, OVERRIDES)] if kind == "megatron-lm" else []):
        found.append((tuple(rule for rule in rules if rule.option not in seen), place))
        seen |= {rule.option for rule in rules}
    return found


def _judged_here(rule: Rule) -> bool:
    """Whether the values of a row can be written: element types and functions are made of other options, which have rows of their own."""
    return rule.option == "moe_router_dtype" or not (rule.option.endswith("_dtype") or rule.option in ("activation_func", "fp8_recipe"))


def _as_off(value: Any, rule: Rule) -> Any:
    """The row's own word for off, where ``value`` is another one."""
    return next((work for work in rule.works if work in OFF), value) if value in OFF else value


def _said(run: Running, finding: Finding, place: str) -> Finding:
    works = written(run.kind, finding.option, finding.values[0], place) if run.kind in ("megatron-lm", "verl") else finding.works
    return replace(finding, side="trainer", origin=run.origin(finding.option), works=works)


def written(kind: Kind, option: str, value: Any, place: str = OVERRIDES) -> str:
    """``option`` (megatron-core's name) with ``value``, ready to be copied; ``place``: where verl takes it.

    >>> written("verl", "apply_rope_fusion", False)
    '++actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=False'
    >>> [written("megatron-lm", *pair) for pair in (("apply_rope_fusion", False), ("num_moe_experts", 8), ("qk_layernorm", False), ("gated_linear_unit", True))]
    ['--no-rope-fusion', '--num-experts 8', 'leave --qk-layernorm out', '--swiglu']
    """
    number = str(int(value)) if isinstance(value, float) and value == int(value) else value
    if kind == "verl":
        return f"++{place}.{option}={'null' if value is None else number}"  # ++ lays over what is there and what is not
    if kind != "megatron-lm":
        return f"{option}={value!r}"
    known, dest = options(kind), {ours: theirs for theirs, ours in CORE_NAMES.items()} | {"gated_linear_unit": "swiglu"}
    name = dest.get(option, option)
    off = value is None or (value is False and known.defaults.get(name) in OFF)
    spelled = known.spelled(name, not value if off and value is False else number) or f"--{name.replace('_', '-')} {number}"
    before = "--group-query-attention " if name == "num_query_groups" else ""
    return f"leave {spelled.split()[0]} out" if off else before + spelled


def _of_mindspeed(run: Running) -> Iterator[Finding]:
    """MindSpeed's options, by the table by which a model is refused under it; verl's overrides count as written."""
    for name in sorted({*run.written, *(run.get("override_transformer_config", ()) if run.kind == "verl" else ())}):
        option = mindspeed.NAMES.get(name)
        if option is None or option.asked:  # Megatron-LM's own
            continue
        finding = option.broken_by(run)
        if name == "context_parallel_algo" and name in run and run.get("context_parallel_size", 1) not in (None, 1):
            finding = refusal(run[name])
        if finding is not None:
            yield replace(finding, side="trainer")


def rollout(run: Running, model: Model) -> Iterator[Finding]:
    """vLLM's settings against what an engine is refused by when it is built."""
    if run.kind == "words":
        yield Finding("a layout in words says nothing about options", "give vLLM's arguments to have them looked at", side="rollout", level="note")
        return
    asked = dict(run)
    asked |= {name: laid for name in ("speculative_config", "kv_transfer_config") if (laid := mapping_of(run, name))}
    for name in ("pipeline", "data"):  # verl's names
        asked[f"{name}_parallel_size"] = max(run.get(f"{name}_model_parallel_size") or 1, run.get(f"{name}_parallel_size") or 1)
    block = run.get("block_size")
    asked |= {"block_size": block if isinstance(block, int) else None, "max_model_len": whole_number(run.get("max_model_len")), "positions": model.positions}
    asked |= {"dtype": computes_in(run, model.dtype)} if "dtype" in run else {}
    for finding in refused_options.problems(asked):
        if finding.option not in run.left:
            yield replace(finding, side="rollout", origin=run.origin(finding.option) if run.get(finding.option) == finding.value else "")
    if run.kind == "verl" and run.get("name", "vllm") != "vllm":
        yield Finding("only vLLM has layers here", f"{TREE}.rollout.name=vllm", "name", run["name"], side="rollout")
    if run.get("dtype") == "auto" and model.dtype == "float32":
        why = "the checkpoint is float32, and vLLM would compute it in bfloat16"
        works = "dtype float32, or bfloat16 where the trainer uses that too"
        yield Finding(why, works, "dtype", "auto", side="rollout", origin=run.origin("dtype"))


TYPES = {"float": "float32", "half": "float16"}
"""vLLM's other names of element types."""


def computes_in(run: Running, checkpoint: str) -> str:
    """The element type that vLLM computes in, for weights of type ``checkpoint``: ``auto`` turns float32 into bfloat16."""
    asked = str(run.get("dtype"))
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

"""What the contract asks of a training script's arguments: defaults it changes, and options it refuses by name."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from typing import Any

from tio_megatron.findings import finding as findings
from tio_megatron.findings.finding import OFF, Finding, Rule, broken


@dataclass(frozen=True)
class Implied:
    """A default of Megatron-LM that cannot be under the contract, and what it is changed to. What the command line says itself stays."""

    option: str
    value: Any
    flag: str
    why: str


IMPLIED = (
    Implied("transformer_impl", "local", "--transformer-impl local", "the layers are ours, and need no Transformer Engine"),
    Implied("calculate_per_token_loss", True, "--calculate-per-token-loss", "a mean in each micro-batch depends on the cut"),
    Implied("apply_rope_fusion", False, "--no-rope-fusion", "the fused rotation has other roundings"),
    Implied("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion", "weight gradients are exact sums"),
    Implied("bias_dropout_fusion", False, "--no-bias-dropout-fusion", "there is neither bias nor dropout"),
    Implied("create_attention_mask_in_dataloader", False, "--no-create-attention-mask-in-dataloader", "attention is causal without a mask"),
)

_INFERENCE = "megatron-core's inference engines are not covered"
_FSDP = "FSDP shards and reduces in its own way"

SCRIPT_RULES = (
    Rule("use_legacy_models", OFF, "the legacy model is not megatron-core's, and none of its sums is ours"),
    Rule("use_torch_fsdp2", OFF, _FSDP),
    Rule("use_megatron_fsdp", OFF, _FSDP),
    Rule("reset_attention_mask", OFF, "attention is causal over the whole sequence; packed samples (--sft) keep documents apart"),
    Rule("perform_rl_step", OFF, _INFERENCE),
    Rule("modelopt_enabled", OFF, "ModelOpt builds models of its own"),
    Rule("log_params_norm", OFF, "that norm is added in the layout's order, by whatever apex or Transformer Engine is there"),
    Rule("inprocess_restart", OFF, "a restarted process keeps sums of the step that failed"),
    Rule("fake_process_group", OFF, "ranks that do not exist add nothing"),
)
"""Options of the script itself. What reaches the model's, the optimizer's or DDP's configuration is refused there."""


def imply(parser: argparse.ArgumentParser) -> None:
    """Change the defaults of :data:`IMPLIED`.

    Raises:
        ValueError: the parser does not know one of them: another version of Megatron-LM.
    """
    known = {action.dest for action in parser._actions}
    missing = [one.option for one in IMPLIED if one.option not in known]
    if missing:
        raise ValueError(f"Megatron-LM's arguments have no {', '.join(missing)}: tio_megatron supports Megatron-LM core_v0.16.1")
    parser.set_defaults(**{one.option: one.value for one in IMPLIED})


def implied(args: Any) -> list[str]:
    """The flags of :data:`IMPLIED` that are in force in ``args``."""
    return [one.flag for one in IMPLIED if getattr(args, one.option, None) == one.value]


def of_optimizer(args: Any) -> list[Finding]:
    """What the optimizer and data parallelism would be refused for when they are built, which a dry run does not reach.

    Args:
        args: as Megatron-LM's own checks leave them.
    """
    from tio_megatron.integrations.megatron.training.optimizer_refusals import BF16_RULES, DDP_RULES, OPTIMIZER_RULES

    renamed = {name.removeprefix("ddp_"): value for name, value in vars(args).items() if name.startswith("ddp_")}
    ddp = {**vars(args), **renamed, "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32}
    return broken(OPTIMIZER_RULES, args) + broken(DDP_RULES, ddp) + (broken(BF16_RULES, ddp) if args.bf16 else [])


def refuse(args: Any) -> None:
    """Refuse what a script cannot do under the contract.

    Args:
        args: as parsed, before Megatron-LM's own checks, some of which would die first without a word on the cause.

    Raises:
        ValueError: lists every option by name.
    """
    found = broken(SCRIPT_RULES, args)
    if getattr(args, "transformer_impl", "local") == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        works = "'local' (or nothing) would work, with the same bytes"
        found.append(Finding("Transformer Engine is not installed", works, "transformer_impl", "transformer_engine"))
    findings.refuse("this run cannot obey the contract with these options", found)

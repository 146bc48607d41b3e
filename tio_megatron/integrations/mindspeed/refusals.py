"""What stands in the way of a model under MindSpeed, by name."""

from __future__ import annotations

import sys
from typing import Any

from tio_megatron.findings.finding import Finding
from tio_megatron.integrations.mindspeed import context, manager, options

_OURS = "tio_megatron.integrations.megatron."
_BLOCK = "megatron.core.transformer.transformer_block.TransformerBlock"


def mindspeed_refusals(config: Any) -> list[Finding]:
    """What is found of every option and every import order that the contract cannot obey; nothing where MindSpeed was not imported.

    Args:
        config: the model's. MindSpeed puts its own options into every configuration; those that it reads now are looked at too.
    """
    if not manager.present():
        return []
    arguments = manager.arguments()
    found = options.problems(config, arguments) + list(options.unknown(arguments, manager.default_arguments()))
    return found + context.refusals(config) + _recomputation(config) + foreign_bases()


def _recomputation(config: Any) -> list[Finding]:
    """MindSpeed's own form of block recomputation does not hand the padding mask on, and padding would count in the auxiliary loss."""
    from tio_megatron.integrations.megatron.applied.moe_refusals import has_balance_loss

    entry = manager.manager().patches_info.get(f"{_BLOCK}._checkpointed_forward")
    if entry is None or entry.patch_func is None or not has_balance_loss(config):
        return []
    why = "MindSpeed's form loses padding_mask, which the auxiliary loss needs"
    return [Finding(why, "'uniform' or moe_aux_loss_coeff=0.0 works", "recompute_method", "block")]


def foreign_bases() -> list[Finding]:
    """One finding for each class of ours that was built on a class of MindSpeed, because MindSpeed had replaced stock's when ours was first imported."""
    found = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(_OURS):
            continue
        for thing in vars(module).values():
            if isinstance(thing, type) and thing.__module__ == name:
                theirs = next((base for base in thing.__mro__ if base.__module__.partition(".")[0] == "mindspeed"), None)
                if theirs is not None:
                    why = f"{thing.__name__} is built on MindSpeed's {theirs.__name__}"
                    found.append(Finding(why, "call tio_megatron.apply(), or import tio_megatron.auto, before MindSpeed"))
    return found

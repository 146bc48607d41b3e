"""Whether all ranks were started for the same job: their options, contract, kernels, packages, model, dtype, tokenizer and token ids.

Hosts that share a file system by name alone, or were set up on different days, would else train something that nobody asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import fields
from typing import TYPE_CHECKING

from examples.qwen3_moe import early, ending, prompts, stages
from examples.qwen3_moe.consistency_options import ConsistencyOptions
from examples.qwen3_moe.ending import InputProblem
from examples.qwen3_moe.options import Options
from tio_megatron import kernels
from tio_megatron.contract import Contract
from tio_megatron.integrations import releases
from tio_megatron.integrations.handshake import unusual

if TYPE_CHECKING:
    from examples.qwen3_moe.rl_options import RlOptions
    from examples.qwen3_moe.world import World

_BAD = "input"
SAME = ("TIO_COLLECTIVE_SCHEDULE", "TIO_COLLECTIVE_SWITCH_BYTES", "TIO_COLLECTIVE_SECONDS")
"""Variables that decide what ranks send each other, and how long they wait for it."""
_OWN = {"out", "cache", "picture", "prompts", "model", "job", "contract"}
"""Paths: what lies there must agree, not what it is called. (And the parts of the options that are looked at for themselves.)"""


def facts(given: Options | RlOptions | ConsistencyOptions) -> dict[str, str]:
    """What must be the same on every rank, by name.

    Raises:
        ValueError: bad input, in one line.
        OSError: a file cannot be read.
    """
    if isinstance(given, ConsistencyOptions):  # it makes its model
        return _program(given.contract) | _options(given)
    options = given if isinstance(given, Options) else given.job
    contract, configs = stages.contract_for(options), stages.configs(options)
    found = _program(contract) | _options(options) | _options(given)
    found["dtype"] = " ".join(config.dtype for config in configs)
    found["model"] = _digest([json.dumps(config.raw, sort_keys=True, default=str) for config in configs])
    tokenizer = options.model / "tokenizer.json" if options.model is not None else None
    found["tokenizer"] = _digest([tokenizer.read_bytes().hex()]) if tokenizer is not None and tokenizer.is_file() else "made, or none"
    found["token ids"] = _digest([json.dumps(prompt) for prompt in prompts.read(options.prompts)]) if options.prompts is not None else "made"
    return found


def _program(contract: Contract) -> dict[str, str]:
    version = kernels.version(contract.family)
    found = {name: releases.installed(name) or "not installed" for name in (*early.SUPPORTED, "numpy")} | {"python": platform.python_version()}
    found |= {name: os.environ.get(name, "not set") for name in SAME}
    return found | {"kernel family": contract.family, "kernels": version, "contract": contract.fingerprint(version)}


def _options(given: Options | RlOptions | ConsistencyOptions) -> dict[str, str]:
    return {f"option {field.name}": _words(getattr(given, field.name)) for field in fields(given) if field.name not in _OWN}


def require(world: World, options: Options | RlOptions | ConsistencyOptions) -> None:
    """Every rank calls it before the job makes anything.

    Raises:
        InputProblem: on every rank, naming each rank that differs from most, the field and both values; or what one of them cannot read.
    """
    try:
        mine = facts(options)
    except (OSError, ValueError) as error:  # the others wait for this rank's answer
        mine = {_BAD: ending.describe(error)}
    everyone = world.gather(mine)
    bad = [rank for rank, theirs in enumerate(everyone) if _BAD in theirs]
    if len(bad) == len(everyone):
        return  # nobody differs, and rank 0 is about to say it
    lines = [f"rank {rank}: {everyone[rank][_BAD]}" for rank in bad] or unusual(everyone, [f"rank {rank}" for rank in range(len(everyone))])
    if lines:
        raise InputProblem(f"the ranks were not started for the same job: {'; '.join(lines[:8])}")


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

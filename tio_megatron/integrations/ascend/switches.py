"""The switches of an NPU's libraries that move an order of sums: set before anything reads them, verified, and reported.

HCCL reads its variable when a process group is made, ATB and the product's libraries when they are loaded: so :func:`prepare` comes first in a process,
before ``torch.distributed.init_process_group``. ``tio_megatron.apply`` and the vLLM plug-in call it for a contract of an NPU's family.

Our sums between ranks are moved bytes and our own tree, so the two variables of collectives guard what an engine does beside us (a loss that is logged,
a norm of its own). What matters to the bytes are the products' variables and the deterministic level.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from tio_megatron.integrations.npu_switches import SWITCHES, against, missing

LEVEL = 1
"""Deterministic level that is asked for: 1, the same bytes from run to run (the gradient of attention adds with atomics below it). 2 and 3 promise more
about products (the same bytes in every place of a batch) and cost time; ``ascend_selfcheck`` tells whether a device needs them."""


class SwitchError(ValueError):
    """A switch that moves an order is against it, or comes too late."""


def prepare(environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Set the variables that nobody has set. Harmless when they are right already.

    Args:
        environ: ``os.environ`` by default.

    Returns:
        What was set now.

    Raises:
        SwitchError: somebody set one to a value that moves an order, or one is missing and the process group, which reads them, is there already.
    """
    values = os.environ if environ is None else environ
    wrong = _conflicts(values)
    if wrong:
        raise SwitchError("switches of the NPU are set against a fixed order: " + "; ".join(wrong))
    new = {switch.name: switch.value for switch in missing(values)}
    if new and environ is None and _group_is_up():
        words = " ".join(f"{name}={value}" for name, value in new.items())
        raise SwitchError(
            f"the process group was made before {', '.join(new)} could be set, and has read them: put {words} into the "
            "environment of every process, or call tio_megatron.apply(...) before torch.distributed.init_process_group"
        )
    values.update(new)
    return new


def set_level(level: int = LEVEL) -> None:
    """Ask torch_npu for a deterministic level. Before the first operator.

    Raises:
        ValueError: not 1, 2 or 3.
        SwitchError: this torch_npu, or its CANN, has no such level.
    """
    if level not in (1, 2, 3):
        raise ValueError(f"deterministic level {level}: 1, 2 or 3 (0 gives other bytes from run to run)")
    torch.use_deterministic_algorithms(True, warn_only=True)  # at once, or torch_npu warns that the two differ
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # else every new buffer is written twice
    if level == 1:
        return
    npu = _npu()
    if npu is None or not hasattr(npu, "set_deterministic_level"):
        raise SwitchError(f"deterministic level {level} needs a torch_npu with set_deterministic_level; this process has none. Level 1 needs nothing")
    try:
        npu.set_deterministic_level(level)
    except RuntimeError as error:
        raise SwitchError(
            f"deterministic level {level} is not to be had from this CANN ({str(error).splitlines()[0]}); levels above 1 need 8.5 or later"
        ) from error


def verify(environ: Mapping[str, str] | None = None) -> None:
    """Refuse to go on with a switch that is missing or wrong.

    Raises:
        SwitchError: names each, and what would work.
    """
    values = os.environ if environ is None else environ
    wrong = _conflicts(values) + [f"{s.name} is not set ({s.about}); {s.name}={s.value} works" for s in missing(values)]
    if wrong:
        raise SwitchError("switches of the NPU: " + "; ".join(wrong))


def report(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """For the doctor and the self-check: every switch as it is and as it should be, the level, and what is wrong. Changes nothing.

    Returns:
        ``variables`` (name to ``value``, ``works``, ``about``), ``deterministic`` (torch's setting), ``level`` (torch_npu's, or None where it cannot be
        asked), ``group`` (a process group is there) and ``problems``, one line each.
    """
    values = os.environ if environ is None else environ
    variables = {s.name: {"value": values.get(s.name), "works": [s.value, *s.also], "about": s.about} for s in SWITCHES}
    problems = _conflicts(values) + [f"{s.name} is not set; {s.name}={s.value} works" for s in missing(values)]
    level = _level()
    if level == 0:
        problems.append("the deterministic level is 0: the gradient of attention differs from run to run")
    return {
        "variables": variables,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "level": level,
        "group": _group_is_up(),
        "problems": problems,
    }


def _conflicts(values: Mapping[str, str]) -> list[str]:
    return [f"{switch.name}={values[switch.name]} ({switch.about}); {switch.works} works" for switch in against(values)]


def _group_is_up() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _npu() -> Any:
    return getattr(torch, "npu", None) if "torch_npu" in sys.modules else None


def _level() -> int | None:
    npu = _npu()
    ask = getattr(npu, "_get_deterministic_level", None)
    return None if ask is None else int(ask())

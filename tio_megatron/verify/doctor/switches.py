"""Environment variables as they are set here: each helps a fixed order of sums, breaks it, or is neutral, with the reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from tio_megatron.findings.finding import UNSAID, Finding, Level
from tio_megatron.integrations import npu_switches
from tio_megatron.integrations.switch_names import PREFIXES
from tio_megatron.verify.doctor import on_npu
from tio_megatron.verify.doctor.switch_table import ANY, HARMLESS, SWITCHES, UNSET, Switch

TOPIC = "environment"


def check(device: str, *, plugged: bool, environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Every variable that is set and counts on ``device``, and every one that breaks an order by being unset.

    Args:
        device: where the run will be (``cpu``, ``cuda`` or ``npu``).
        plugged: whether it runs under the contract (else stock packages).
        environ: ``os.environ`` by default.
    """
    yield from judged(device, os.environ if environ is None else environ, plugged=plugged)
    yield from _torch()


def judged(device: str, values: Mapping[str, str], *, plugged: bool, started: bool = False) -> Iterator[Finding]:
    """:func:`check` of variables alone, which may be another process's; ``started``: one that runs under the contract already."""
    clean = True
    npu = {finding.option: finding for finding in of_npu(values, started=started)} if plugged and device == "npu" else {}
    for switch in SWITCHES:
        if switch.device not in ("", device):
            continue
        value = values.get(switch.name)
        if switch.name in npu:
            clean = clean and npu[switch.name].level != "bad"
            yield npu[switch.name]
            continue
        does = effect(switch, value)
        if does == "breaks":
            if plugged and value is None and switch.level == "note" and switch.name != "OMP_NUM_THREADS":
                continue  # nobody asked for it, and it changes nothing here
            clean = False
            about = switch.plugged if plugged else switch.why
            harmless = plugged and value is None
            yield _of(switch.name, value, about if harmless else f"breaks: {about}", switch.works, switch.level if plugged else "note")
        elif value is not None:
            yield _of(switch.name, value, f"{does}: {switch.why}")
    known = {switch.name for switch in SWITCHES}
    if plugged and device == "npu":
        for finding in on_npu.variables(values, started=started):
            known.add(finding.option)
            clean = clean and finding.level != "bad"
            yield finding
    for name in sorted(values):
        if name.startswith(PREFIXES) and name not in known and not name.startswith(HARMLESS):
            why = f"{name} is set: what it does to an order of sums is not known here"
            yield Finding(why, "compare with a run without it (tio logdiff)", level="note", topic=TOPIC)
    if clean:
        yield Finding(f"no variable that moves an order on {device} is set against it", level="ok", topic=TOPIC)


def _of(name: str, value: str | None, why: str, works: str = "", level: Level = "ok") -> Finding:
    return Finding(why, works, name, UNSAID if value is None else value, origin="unset" if value is None else "", level=level, topic=TOPIC)


def of_npu(values: Mapping[str, str], *, started: bool = False) -> Iterator[Finding]:
    """An NPU's switches under the contract: bad is what a start refuses, and what it sets is a note. In a process that has started, it must be there."""
    against, missing = npu_switches.against(values), npu_switches.missing(values)
    for switch in npu_switches.SWITCHES:
        value = values.get(switch.name)
        if switch in against:
            yield _of(switch.name, value, f"breaks: {switch.about}", f"{switch.name}={switch.works}, or leave it unset", "bad")
        elif switch in missing and started:
            yield _of(switch.name, None, f"breaks: {switch.about}; the start had set it", f"{switch.name}={switch.value}", "bad")
        elif switch in missing:
            yield _of(switch.name, None, f"the start sets {switch.value}, before the process group is made: {switch.about}", level="note")
        else:
            yield _of(switch.name, value, f"helps: {switch.about}")


def effect(switch: Switch, value: str | None) -> str:
    """``helps``, ``breaks`` or ``neutral``.

    >>> ring = next(one for one in SWITCHES if one.name == "NCCL_ALGO")
    >>> effect(ring, "Ring"), effect(ring, None), effect(ring, "nvls")
    ('helps', 'breaks', 'neutral')
    """
    said = UNSET if value is None else value.lower()
    if said in switch.breaks:
        return "breaks"
    return "helps" if said in switch.helps or (switch.helps == ANY and value is not None) else "neutral"


def _torch() -> Iterator[Finding]:
    """torch's own switch is no variable: a script sets it. Asked only where torch is imported already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        yield Finding("torch.use_deterministic_algorithms is on: helps: the same bytes from run to run, not from layout to layout", level="ok", topic=TOPIC)

"""Looks at an environment and a configuration before any run. Starts no engine, no rank, and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import VARIABLE, from_environment, read
from tio_megatron.findings.finding import Finding, worst
from tio_megatron.findings.messages import named, shown
from tio_megatron.verify.doctor import (
    between,
    coverage,
    fits,
    on_npu,
    options,
    settings,
    sources,
    stock,
    switches,
    symbols,
    verl,
    versions,
)
from tio_megatron.verify.doctor import held as held_by
from tio_megatron.verify.doctor.fits import Fit, fit
from tio_megatron.verify.doctor.models import model_of, shape_of

__all__ = ["Examined", "Finding", "Fit", "examine", "fit", "model_of", "of_workers", "shape_of", "worst"]


@dataclass(frozen=True)
class Examined:
    """All findings, and the fit of the two layouts when they were given."""

    findings: tuple[Finding, ...]
    fit: Fit | None = None


def examine(
    *,
    model: str | None = None,
    trainer: str | None = None,
    rollout: str | None = None,
    contract: str | None = None,
    device: str = "cpu",
    plugged: bool = True,
    training: bool = True,
    modules: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Examined:
    """Everything that can be known before a run.

    Args:
        model: as :func:`.models.shape_of` takes it; needed with the layouts.
        trainer: words (``tp2+ep2``), Megatron arguments or a file of them; see :mod:`.settings`.
        rollout: the same of the rollout engine.
        contract: the one both sides will load (:func:`tio_megatron.contract.environment.read`); by default that of ``TIO_CONTRACT`` here, or else
            the smallest that serves both, of the device's family.
        device: ``cpu``, ``cuda`` or ``npu``.
        plugged: under the contract; False looks at stock packages.
        training: the trainer computes gradients too.
        modules: imported first, in order; see :mod:`.symbols`.
        environ: of the run's processes; that of this process by default.

    Raises:
        ValueError: input that cannot be read, or only one of two things that need each other.
    """
    found: list[Finding] = [
        *versions.check(device=device if plugged else "cpu"),
        *switches.check(device, plugged=plugged, environ=environ),
        *symbols.check(modules),
    ]
    held, source = _contract(contract, plugged, environ)
    if plugged and environ is not None and environ.get(VARIABLE) == "0":
        found.append(Finding("the packages are left stock", f"{VARIABLE}=1; or --stock for stock packages", VARIABLE, "0", topic="contract"))
    if held is not None and plugged:
        found += held_by.runs_on(held, device, source)
    given = [name for name, value in (("--model", model), ("--trainer", trainer), ("--rollout", rollout)) if value is None]
    if len(given) == 3:
        return Examined(tuple(found))
    if model is None or trainer is None or rollout is None:
        raise ValueError(f"{' and '.join(given)}: missing; a model, a trainer and a rollout are looked at together")
    known = model_of(model)
    left, right = settings.trainer(trainer), settings.rollout(rollout)
    if plugged:
        theirs = [one for one in (held_by.of_trainer(left.running), held_by.of_rollout(right.running)) if one is not None]
        found += held_by.judge(theirs, held, source, device)
        held = next((one.contract for one in theirs if one.contract is not None), held)
    result = fits.fit(known.shape, left.layout.layout, right.layout.layout, contract=held, training=training, family=held_by.of_device(device))
    found += between.check(left.running, right.running, known)
    if plugged:
        found += [*options.trainer(left.running, training=training), *options.rollout(right.running, known), *_engine(device)]
        found += verl.check(left.running, right.running, known)
        if device == "npu":
            found += on_npu.rollout(right.running, known.dtype, os.environ if environ is None else environ)
    else:
        found += stock.check(left.running, right.running)
    found += [*sources.check(left.running, right.running, model, known.said), *coverage.check(left.running, right.running, device, plugged=plugged)]
    holes = [*dict.fromkeys((*left.holes, *right.holes))]
    found += [Finding("not judged: it may hold options", "write them out", shown(word), level="unknown") for word in holes]
    if holes:  # sizes and defaults may stand there
        doubt = f"more may stand in {named(holes, most=3)}"
        found = [replace(f, level="unknown", works=f"{f.works}; {doubt}" if f.works else doubt) if f.origin and f.level == "bad" else f for f in found]
    return Examined(tuple(once([*found, *result.findings])), result)


def once(found: Sequence[Finding]) -> Iterator[Finding]:
    """Of what several tables say of one option: the first that is bad, else the first that could not tell; notes all."""
    worst_of: dict[tuple[str, str], Finding] = {}
    for finding in found:
        if finding.option and finding.topic == "options" and finding.level in ("bad", "unknown"):
            before = worst_of.setdefault(_about(finding), finding)
            if before.level == "unknown" and finding.level == "bad":
                worst_of[_about(finding)] = finding
    for finding in found:
        if _about(finding) not in worst_of or finding.level in ("ok", "note") or finding is worst_of[_about(finding)] or finding.topic != "options":
            yield finding


def _about(finding: Finding) -> tuple[str, str]:
    """The side and the name that all tables give an option; verl writes it below the side's part of its tree."""
    *way, name = finding.option.split(".")
    name = name.replace("-", "_")
    side = next((side for part, side in (("actor", "trainer"), ("rollout", "rollout"), ("ref", "ref")) if part in way[1:2]), finding.side)
    return side, finding.option if name in ("enable", "mode", "rank") else name


def _contract(given: str | None, plugged: bool, environ: Mapping[str, str] | None) -> tuple[Contract | None, str]:
    """The contract that is named, and by whom; None where nobody names one."""
    if given is not None:
        return read(given).contract, "--contract"
    found = from_environment(environ) if plugged else None
    return (None, "") if found is None else (found.contract, VARIABLE)


def of_workers(folder: Path, device: str = "cpu", contract: str | None = None) -> Examined:
    """What the workers of a run say of themselves, in the folder that ``TIO_HANDSHAKE`` named for them. See :mod:`.workers`.

    Raises:
        ValueError: no worker has left an answer there, or a file is none.
    """
    from tio_megatron.verify.doctor import workers  # torch comes with it

    return Examined(tuple(workers.check(workers.read(folder), device, contract)))


def _engine(device: str) -> Iterator[Finding]:
    """Whether vLLM's plug-in has layers for ``device``."""
    if device == "cuda":
        yield Finding("the vLLM plug-in has layers for CPUs and Ascend NPUs, none for GPUs", "--device cpu or npu; --stock for stock packages", side="rollout")

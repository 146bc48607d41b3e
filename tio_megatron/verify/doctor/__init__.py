"""Looks at an environment and a configuration before any run. Starts no engine, no rank, and changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import VARIABLE, from_environment, read
from tio_megatron.verify.doctor import (
    between,
    coverage,
    families,
    fits,
    mindspeed,
    on_npu,
    options,
    settings,
    sources,
    stock,
    switches,
    symbols,
    variables,
    verl_start,
    versions,
)
from tio_megatron.verify.doctor import held as held_by
from tio_megatron.verify.doctor.findings import Finding, worst
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

    Raises:
        ValueError: input that cannot be read, or only one of two things that need each other.
    """
    found: list[Finding] = [*versions.check(device=device if plugged else "cpu"), *switches.check(device, plugged=plugged), *symbols.check(modules)]
    held, source = _contract(contract, plugged)
    if held is not None and plugged:
        found += families.check(held, device, source)
    given = [name for name, value in (("--model", model), ("--trainer", trainer), ("--rollout", rollout)) if value is None]
    if len(given) == 3:
        return Examined(tuple(found))
    if model is None or trainer is None or rollout is None:
        raise ValueError(f"{' and '.join(given)}: missing; a model, a trainer and a rollout are looked at together")
    known = model_of(model)
    left, right = settings.trainer(trainer), settings.rollout(rollout)
    if plugged:
        named = [one for one in (held_by.of_trainer(left.running), held_by.of_rollout(right.running)) if one is not None]
        found += held_by.judge(named, held, source, device)
        held = next((one.contract for one in named if one.contract is not None), held)
    result = fits.fit(known.shape, left.layout.layout, right.layout.layout, contract=held, training=training, family=families.of_device(device))
    if plugged:
        found += [*options.trainer(left.running, training=training), *options.rollout(right.running, known.dtype, known.positions), *_engine(device)]
        found += mindspeed.trainer(left.running)
        if device == "npu":
            found += on_npu.rollout(right.running, known.dtype, os.environ)
    else:
        found += stock.check(left.running, right.running)
    judged = {_option(finding.what) for finding in found}
    found += [one for one in between.check(left.running, right.running, known) if _option(one.what) not in judged]
    unheard = coverage.check(left.running, right.running, device if plugged else "cpu", plugged=plugged)
    found += [
        *sources.check(left.running, right.running, model, known.said),
        *unheard,
        *variables.taken(left, right),
        *variables.holes(left, right),
        *result.findings,
    ]
    found = list(variables.judge(left.running, right.running, found, {"trainer": left.holes, "rollout": right.holes}))
    if plugged:
        found = [*verl_start.judge(left.running, right.running, found, known), *verl_start.of_ref(left.running, known)]
    return Examined(tuple(found), result)


def _contract(given: str | None, plugged: bool) -> tuple[Contract | None, str]:
    """The contract that is named, and by whom; None where nobody names one."""
    if given is not None:
        return read(given).contract, "--contract"
    found = from_environment() if plugged else None
    return (None, "") if found is None else (found.contract, VARIABLE)


def _option(what: str) -> str:
    """``trainer: window_size`` of a finding about one option, which two tables may know; else all of it."""
    found = re.match(r"(trainer: \w+) = ", what)
    return found[1] if found else what


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
        yield Finding(
            "bad",
            options.TOPIC,
            "rollout: the vLLM plug-in has layers for CPUs and Ascend NPUs, none for GPUs",
            "--device cpu or npu; --stock for stock packages",
        )

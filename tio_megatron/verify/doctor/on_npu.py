"""What a rollout on an NPU is refused for at its start, found before it: the same tables (:mod:`tio_megatron.integrations.vllm.ascend.refusals`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tio_megatron.findings.finding import UNSAID, Finding
from tio_megatron.findings.messages import shown
from tio_megatron.integrations.vllm.ascend import refusals
from tio_megatron.verify.doctor.options import OFF, computes_in
from tio_megatron.verify.doctor.running import Running, mapping_of, tree_of

ENVIRONMENT = "environment"


def rollout(run: Running, checkpoint: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Options of the engine, and what only means something beside them.

    Args:
        run: as it will run; in words nothing is known.
        checkpoint: element type of the weights in the folder.
        environ: variables of the engine's processes.
    """
    if run.kind == "words":
        return
    given, strange = additional(run)
    for finding in (*refusals.of_engine(_asked(run, checkpoint)), *refusals.of_additional(given)):
        yield replace(finding, side="rollout", origin=run.origin(finding.option) if finding.option in run else "")
    for finding in refusals.of_environment(environ, given):
        if (key := refusals.DEFAULTS_THAT_ARE_REFUSED.get(finding.option)) is not None:
            yield replace(_variable(finding), works=f"{finding.works}, or additional_config with {key} 0")
    if strange:
        why = f"not judged: vllm-ascend 0.23.0 reads no key {', '.join(strange)}"
        yield Finding(why, "leave it out", "additional_config", side="rollout", level="unknown")


def additional(run: Running) -> tuple[dict[str, Any], list[str]]:
    """The keys of ``additional_config``, and those among them that no table knows; one of the second alone where it is no mapping."""
    value, given = run.get("additional_config"), mapping_of(run, "additional_config")
    if value not in OFF and tree_of(value) is None:
        return given, [shown(value)]
    return given, sorted(str(key) for key in given if key not in refusals.OPTIONS and key not in refusals.HARMLESS and key != "tio_contract")


def _asked(run: Running, checkpoint: str) -> refusals.Asked:
    block = run.get("block_size")
    return refusals.Asked(
        enforce_eager=bool(run.get("enforce_eager")),
        graphs=False,  # enforce_eager leaves none; a compilation_config beside it is not judged (coverage)
        dtype=computes_in(run, checkpoint),
        block_size=block if isinstance(block, int) else None,
        logprobs_mode=str(run.get("logprobs_mode")),
        weight_transfer=run.get("weight_transfer_config") not in OFF,
        async_scheduling=bool(run["async_scheduling"]) if run.get("async_scheduling") is not None else run.get("distributed_executor_backend") != "ray",
        sleep=bool(run["enable_sleep_mode"]) if "enable_sleep_mode" in run.written else run.kind == "verl",  # verl 0.9.1 asks for it unless told otherwise
    )


def variables(values: Mapping[str, str], *, started: bool) -> Iterator[Finding]:
    """The variables of an NPU's engines and of our attention there, one finding each; those that decide nothing alone have a note.

    Args:
        values: the process's.
        started: it runs under the contract: its own start has judged what vllm-ascend reads.
    """
    for name in refusals.HARMLESS_ENVIRONMENT:
        if name in values and name.startswith("VLLM_"):
            yield Finding("neutral: no sum of a model of ours depends on it", "", name, values[name], level="ok", topic=ENVIRONMENT)
    refused = {finding.option: finding for finding in refusals.of_environment(values, {})}
    for name in refusals.ENVIRONMENT:
        finding, is_now = refused.get(name), values.get(name)
        if finding is None or started:
            why = "its start took it" if started else "as vllm-ascend's options must be"
            if is_now is not None:
                yield Finding(f"neutral: {why}", "", name, is_now, level="ok", topic=ENVIRONMENT)
            continue
        key = refusals.DEFAULTS_THAT_ARE_REFUSED.get(name)
        if key is None:
            yield replace(_variable(finding), works=f"{finding.works}, or leave it unset")
        else:
            why = f"{finding.why}; the start refuses it, unless additional_config has {key} 0, which engine_options gives"
            yield replace(_variable(finding), why=why, level="note")
    yield from _attention(values)


def _attention(values: Mapping[str, str]) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return  # the kernels import it, and no NPU runs without it
    from tio_megatron.integrations.ascend.start import PACKAGES
    from tio_megatron.kernels import npu_family

    name = npu_family.VARIABLE
    try:
        route = npu_family.asked(values)
    except ValueError as error:
        yield Finding(str(error), f"{name}={npu_family.ROUTES[0]}, or leave it unset", name, topic=ENVIRONMENT)
        return
    package = PACKAGES[route]
    if package is not None and importlib.util.find_spec(package) is None:
        why = f"{package} is not installed here, and the start refuses where it is not"
        yield Finding(why, "docs/ascend.md", name, route, level="note", topic=ENVIRONMENT)
    elif values.get(name):
        yield Finding("the same on both sides, or they refuse each other", "", name, route, level="ok", topic=ENVIRONMENT)


def _variable(finding: Finding) -> Finding:
    """Of a variable that is set, or of one that breaks an order by being unset."""
    unset = finding.value is None
    return replace(finding, why=f"breaks: {finding.why}", value=UNSAID if unset else finding.value, origin="unset" if unset else "")

"""What a rollout on an NPU is refused for at its start, found before it: the same tables (:mod:`tio_megatron.integrations.vllm.ascend.refusals`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from tio_megatron.contract.messages import shown
from tio_megatron.integrations.vllm.ascend import refusals
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.options import OFF, TOPIC, computes_in
from tio_megatron.verify.doctor.running import Running, tree_of

ENVIRONMENT = "environment"
_UNDER = "; the start refuses it, unless additional_config has {key} 0, which engine_options gives"


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
    for line in (*refusals.of_engine(_asked(run, checkpoint)), *refusals.of_additional(given)):
        yield _bad(TOPIC, f"rollout: {line}")
    for name in refusals.DEFAULTS_THAT_ARE_REFUSED:
        for line in refusals.of_environment(environ, given):
            if line.startswith(f"{name}="):
                what, _, works = line.rpartition("; ")
                value = f"{name} is {environ.get(name, 'unset')}: breaks: {what.partition(': ')[2]}"
                key = refusals.DEFAULTS_THAT_ARE_REFUSED[name]
                yield Finding("bad", ENVIRONMENT, value, f"{works.removeprefix('set ')}, or additional_config with {key} 0")
    if strange:
        what = f"rollout: additional_config has {', '.join(strange)}: not judged: vllm-ascend 0.23.0 reads no such key"
        yield Finding("unknown", TOPIC, what, "leave it out")


def additional(run: Running) -> tuple[dict[str, Any], list[str]]:
    """The keys of ``additional_config``, and those among them that no table knows; one of the second alone where it is no mapping."""
    value = run.get("additional_config")
    tree = tree_of(value)
    dotted = {name.partition(".")[2]: run[name] for name in run.written if name.startswith("additional_config.")}
    if value not in OFF and tree is None:
        return dotted, [shown(value)]
    given = {**(tree or {}), **dotted}
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
        sleep=bool(run.get("enable_sleep_mode", run.kind == "verl")),  # verl 0.9.1 asks for it unless told otherwise
    )


def variables(values: Mapping[str, str], *, started: bool) -> Iterator[Finding]:
    """The variables of an NPU's engines and of our attention there, one finding each; those that decide nothing alone have a note.

    Args:
        values: the process's.
        started: it runs under the contract: its own start has judged what vllm-ascend reads.
    """
    for name in refusals.HARMLESS_ENVIRONMENT:
        if name in values and name.startswith("VLLM_"):
            yield Finding("ok", ENVIRONMENT, f"{name} is {values[name]}: neutral: no sum of a model of ours depends on it")
    refused = {line.partition("=")[0]: line for line in refusals.of_environment(values, {})}
    for name, (works, _) in refusals.ENVIRONMENT.items():
        line, is_now = refused.get(name), values.get(name)
        if line is None or started:
            if is_now is not None:
                yield Finding("ok", ENVIRONMENT, f"{name} is {is_now}: neutral: " + ("its start took it" if started else "as vllm-ascend's options must be"))
            continue
        why = line.partition(": ")[2].rpartition("; ")[0]
        key = refusals.DEFAULTS_THAT_ARE_REFUSED.get(name)
        if key is None:
            yield Finding("bad", ENVIRONMENT, f"{name} is {is_now}: breaks: {why}", f"{name}={works}, or leave it unset")
        else:
            yield Finding("note", ENVIRONMENT, f"{name} is {is_now or 'unset'}: {why}{_UNDER.format(key=key)}", f"{name}={works}")
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
        yield Finding(
            "bad", ENVIRONMENT, f"{name} is {shown(values[name])}: {str(error).partition(': ')[2]}", f"{name}={npu_family.ROUTES[0]}, or leave it unset"
        )
        return
    package = PACKAGES[route]
    if package is not None and importlib.util.find_spec(package) is None:
        yield Finding("note", ENVIRONMENT, f"{name} is {route}: {package} is not installed here, and the start refuses where it is not", "docs/ascend.md")
    elif values.get(name):
        yield Finding("ok", ENVIRONMENT, f"{name} is {route}: the same on both sides, or they refuse each other")


def _bad(topic: str, line: str) -> Finding:
    what, _, works = line.rpartition("; ")
    return Finding("bad", topic, what, works.removeprefix("use ").removeprefix("set "))

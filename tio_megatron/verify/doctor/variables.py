"""Settings whose value is a variable: what was put in for it, and what could not be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tio_megatron.contract.messages import named, shown
from tio_megatron.verify.doctor import coverage, defaults, vllm_names
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.options import ROLLOUT, SIZES, TOPIC
from tio_megatron.verify.doctor.running import SAMPLING_NAMES, Running
from tio_megatron.verify.doctor.settings import Configured

FREE = frozenset("max_num_seqs max_num_batched_tokens enable_chunked_prefill enable_prefix_caching enforce_eager async_scheduling seed".split())
"""Of vLLM, what moves no byte under the contract."""


def taken(trainer: Configured, rollout: Configured) -> Iterator[Finding]:
    """What a launch script's variables were taken to be."""
    found = {**trainer.taken, **rollout.taken}
    if found:
        says = ", ".join(f"{name} = {shown(value)}" for name, value in list(found.items())[:24])
        more = f" and {len(found) - 24} more" if len(found) > 24 else ""
        reads = list(dict.fromkeys((*trainer.reads, *rollout.reads)))
        unread = f"; not read: {named(reads)}, which may set others" if reads else ""
        yield Finding("note", TOPIC, f"variables as the script and the environment here set them: {says}{more}{unread}")


def judge(trainer: Running, rollout: Running, found: Sequence[Finding]) -> Iterator[Finding]:
    """``found`` without what it says of defaults in the place of variables, and one ``unknown`` for each variable that may change a number."""
    left = [name for run in (trainer, rollout) for name in run.left]
    for one in found:
        if not (one.topic == TOPIC and any(re.search(rf"\b{re.escape(name)} = ", one.what) for name in left)):
            yield one
    for side, run, decides in (("trainer", trainer, _of_trainer(trainer)), ("rollout", rollout, _of_rollout(rollout))):
        for name, value in sorted(run.left.items()):
            if name in decides:
                what = f"{side}: {name} = {shown(value)} is not judged: a variable that is not set here"
                yield Finding("unknown", TOPIC, what, "write it out")


def _of_trainer(run: Running) -> frozenset[str]:
    if run.kind == "megatron-lm":
        return frozenset(run.left) - coverage.HARMLESS - coverage.LAUNCHER
    return coverage.judged_of_trainer() - coverage.HARMLESS


def _of_rollout(run: Running) -> frozenset[str]:
    if run.kind == "vllm":
        return frozenset(run.left) - vllm_names.NEUTRAL - vllm_names.SERVER - coverage.LAUNCHER - FREE
    return frozenset({*defaults.VLLM_ENGINE, *vllm_names.JUDGED, *vllm_names.DECIDING, *ROLLOUT, *SIZES, *SAMPLING_NAMES}) - FREE

"""Settings whose value is a variable: what was put in for it, and what could not be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from tio_megatron.contract.messages import named, shown
from tio_megatron.verify.doctor import coverage, defaults, fits, vllm_names
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.options import ROLLOUT, SIZES, TOPIC
from tio_megatron.verify.doctor.running import SAMPLING_NAMES, Running
from tio_megatron.verify.doctor.settings import Configured, said_twice

FREE = frozenset(
    "max_num_seqs max_num_batched_tokens enable_chunked_prefill enable_prefix_caching enforce_eager async_scheduling seed "
    "param_offload grad_offload optimizer_offload use_dynamic_bsz nnodes n_gpus_per_node free_cache_engine".split()
)
"""What moves no byte under the contract."""


def taken(trainer: Configured, rollout: Configured) -> Iterator[Finding]:
    """What a launch script's variables were taken to be."""
    found = {**trainer.taken, **rollout.taken}
    if found:
        says = ", ".join(f"{name} = {shown(value)}" for name, value in list(found.items())[:24])
        more = f" and {len(found) - 24} more" if len(found) > 24 else ""
        reads = list(dict.fromkeys((*trainer.reads, *rollout.reads)))
        unread = f"; not read: {named(reads)}, said to set paths" if reads else ""
        yield Finding("note", TOPIC, f"variables as the script and the environment here set them: {says}{more}{unread}")


def holes(trainer: Configured, rollout: Configured) -> Iterator[Finding]:
    """Words of a command that may hold any option, and what a script sets for it."""
    for word in dict.fromkeys((*trainer.holes, *rollout.holes)):
        yield Finding("unknown", TOPIC, f"{shown(word)} is not judged: it is not followed here, and may hold options", "write them out")
    sets = {**trainer.sets, **rollout.sets}
    if sets.get("TIO_CONTRACT") == "0":
        yield Finding("bad", TOPIC, "the script sets TIO_CONTRACT=0, which leaves the packages stock", "TIO_CONTRACT=1; or --stock for stock packages")
    if sets:
        what = f"the script sets {named(sorted(sets), most=12)}: looked at was the environment here"
        yield Finding("note", TOPIC, what, "set them for the doctor too")


def judge(trainer: Running, rollout: Running, found: Sequence[Finding], followed: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """``found`` without what it says of defaults in the place of variables, and one ``unknown`` for each variable that may change a number.

    Args:
        trainer: as it will run.
        rollout: as it will run.
        found: by the other rooms.
        followed: for each side, the words that may hold options which were not followed: what has a default may stand in them.
    """
    left = tuple(f"{side}: {name} = " for side, run in (("trainer", trainer), ("rollout", rollout)) for name in run.left)
    for one in found:
        if one.topic == TOPIC and one.what.startswith(left):
            continue
        side = one.what.partition(":")[0]
        words = list(followed.get(side, ())) if one.topic == TOPIC and "'s default)" in one.what else []
        if one.topic == fits.TOPIC and one.what.startswith(("trainer ", "rollout ")):  # of the layouts, which may be others then
            words = [*chain(*followed.values())]
        if words and one.level in ("bad", "ok"):
            one = replace(one, level="unknown", works=f"{one.works or 'as far as it was followed'}; more may stand in {named(words, most=3)}")
        yield one
    for side, run, decides in (("trainer", trainer, _of_trainer(trainer)), ("rollout", rollout, _of_rollout(rollout))):
        for name, value in sorted(run.left.items()):
            if name in decides:
                why = "said in several places" if said_twice(value) else "a variable that is not set here"
                what = f"{side}: {name} = {shown(value)} is not judged: {why}"
                yield Finding("unknown", TOPIC, what, "write it out")


def _of_trainer(run: Running) -> frozenset[str]:
    neutral = coverage.HARMLESS - coverage.rules() | FREE
    if run.kind == "megatron-lm":
        return frozenset(run.left) - neutral - coverage.LAUNCHER
    return (coverage.judged_of_trainer() | frozenset(run.get("override_transformer_config", ()))) - neutral


def _of_rollout(run: Running) -> frozenset[str]:
    if run.kind == "vllm":
        return frozenset(run.left) - vllm_names.NEUTRAL - vllm_names.SERVER - coverage.LAUNCHER - FREE
    return frozenset({*defaults.VLLM_ENGINE, *vllm_names.JUDGED, *vllm_names.DECIDING, *ROLLOUT, *SIZES, *SAMPLING_NAMES}) - FREE

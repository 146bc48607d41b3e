"""The self-check from start to report: processes for the devices, the questions, the table, and what is written."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from tio_megatron.files.whole import write_whole
from tio_megatron.integrations import ascend, releases
from tio_megatron.integrations.ascend import switches
from tio_megatron.kernels import npu_family
from tio_megatron.verify.ascend import answers, between, facts, place, table

LABEL = "tio_megatron self-check of Ascend NPUs"
TWIN = f"{LABEL}: TWIN RUN ON A CPU. Not run on an NPU; nothing here is a claim about one, and no time is a speed"
PACKAGES = ("torch", "torch_npu", "flash_attn_npu_v3", "triton-ascend", "mindspeed", "megatron-core", "vllm", "vllm-ascend")
LEVELS = (1, 2, 3)


def check(out: Path, *, devices: int, twin: bool, quick: bool = False) -> dict[str, Any]:
    """Ask everything, and write ``report.json`` and ``report.txt`` to ``out``.

    Args:
        out: folder, made if needed.
        devices: NPUs, or CPU processes in a twin run.
        twin: ask the CPU twins.
        quick: leave out the questions to one device.

    Returns:
        The report; ``status`` is the exit status.
    """
    out.mkdir(parents=True, exist_ok=True)
    found = _in_processes(devices, twin, None, quick)
    listed = {"one device": found["one"], f"{devices} devices together": found["several"]}
    for level in LEVELS:
        if not twin and not quick:
            listed[f"deterministic level {level}"] = _in_processes(1, twin, level, quick)["one"]
    every = [answer for part in listed.values() for answer in part]
    status, last = answers.verdict(every, found["table"], twin)
    report: dict[str, Any] = {
        "label": TWIN if twin else LABEL,
        "twin": twin,
        "devices": devices,
        "versions": versions(),
        "switches": found["switches"],
        "answers": listed,
        "table": found["table"],
        "verdict": last,
        "status": status,
    }
    write_whole(out / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    write_whole(out / "report.txt", answers.text(report).encode())
    return report


def versions() -> dict[str, str]:
    """Packages, the machine, CANN, and the family's kernels."""
    told = {"machine": platform.machine(), "python": platform.python_version(), "kernels": npu_family.version()}
    told |= {package: releases.installed(package) or "not installed" for package in PACKAGES}
    told["CANN"] = os.environ.get("ASCEND_HOME_PATH", "not set up (ASCEND_HOME_PATH is not set)")
    return told


def _in_processes(devices: int, twin: bool, level: int | None, quick: bool) -> dict[str, Any]:
    """Ranks of their own, so that this process holds no device and a level can be another each time."""
    parts = {"one": "the questions to one device"} | ({"several": "those to several", "table": "the layouts"} if level is None else {})
    with tempfile.TemporaryDirectory(prefix="tio-ascend-") as folder:
        told, lost = Path(folder) / "told.json", ""
        try:
            start_processes(_rank, args=(devices, f"file://{folder}/ranks", str(told), twin, level, quick), nprocs=devices, start_method="spawn")
        except ProcessException as error:  # a device may end a process: what it had answered by then is still worth a report
            lost = str(error).strip().splitlines()[-1]
        answer: dict[str, Any] = json.loads(told.read_text()) if told.exists() else {}
    if lost:
        missing = ", ".join(words for part, words in parts.items() if part not in answer)
        answer = {"one": [], "several": [], "table": [], "switches": ascend.report()} | answer
        answer["one"].append(answers.Answer("the processes came to their end", "no", f"{lost} (not answered: {missing})").to_dict())
    return answer


def _rank(rank: int, size: int, ranks: str, told: str, twin: bool, level: int | None, quick: bool) -> None:
    ascend.prepare()
    here = place.take(rank, twin)
    if level is not None:
        # A level that this device does not know is an answer, not a failure.
        asked = [answers.ask(f"level {level}: the device has it", lambda: switches.set_level(level), needed=False)]
        asked += facts.levels(here, level) if asked[0].holds == "yes" else []
        Path(told).write_text(json.dumps({"one": [answer.to_dict() for answer in asked]}))
        return
    dist.init_process_group("gloo" if twin else "hccl", init_method=ranks, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    group = dist.group.WORLD
    try:
        one = [answer.to_dict() for answer in facts.operators(here)] if rank == 0 and not quick else []
        found = {"one": one, "switches": ascend.report()}
        if rank == 0:
            Path(told).write_text(json.dumps(found))
        dist.barrier()
        several = [answer.to_dict() for answer in between.questions(here, group)] if size > 1 and group is not None else []
        every: list[Any] = [None] * size
        dist.all_gather_object(every, several)
        found["several"] = _together(every)
        if rank == 0:
            Path(told).write_text(json.dumps(found))
        found["table"] = table.rows(here, rank, size)
        if rank == 0:
            Path(told).write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _together(every: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each question once: a no of any rank is the answer, with its number."""
    merged = []
    for said in zip(*every, strict=True):
        bad = [(rank, answer) for rank, answer in enumerate(said) if answer["holds"] == "no"]
        merged.append(bad[0][1] | {"detail": f"rank {bad[0][0]}: {bad[0][1]['detail']}"} if bad else said[0])
    return merged

"""Runs the sides of a table, one after the other in processes of their own, and compares every pair."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tio_megatron.files.whole import write_whole
from tio_megatron.verify.logdiff import Logdiff, logdiff
from tio_megatron.verify.matrix.table import Side, Table
from tio_megatron.verify.readers import read_scored

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TIO_CONTRACT")


@dataclass(frozen=True)
class Cell:
    """One pair: what was found, and the command that compares it again."""

    trainer: Side
    rollout: Side
    found: Logdiff
    command: str

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        found = self.found
        numbers = {"tokens": found.tokens, "nonzero": found.nonzero, "max_abs": found.max_abs, "mean_abs": found.mean_abs, "k3": found.k3}
        return {"trainer": str(self.trainer), "rollout": str(self.rollout), **numbers, "command": self.command}


class SideFailed(ValueError):
    """A side's process ended badly; says where its log is."""


def run(table: Table, folder: Path, progress: Callable[[Side], None] = lambda side: None) -> list[Cell]:
    """Score every side and compare every trainer with every rollout.

    Args:
        table: what to compare.
        folder: for recordings and logs; what is there of them is replaced.
        progress: called before each side is run.

    Raises:
        SideFailed: an engine could not be run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recordings = {}
    for side in table.sides:
        progress(side)
        recordings[side] = record(table, side, folder)
    cells = []
    for trainer in table.trainers:
        for rollout in table.rollouts:
            a, b = recordings[trainer], recordings[rollout]
            cells.append(Cell(trainer, rollout, logdiff(read_scored(a), read_scored(b)), shlex.join(["tio", "logdiff", str(a), str(b)])))
    return cells


def record(table: Table, side: Side, folder: Path, temperature: float = 1.0) -> Path:
    """Score the table's tokens with one side, in a process of its own; returns the recording.

    Raises:
        SideFailed: the engine could not be run.
    """
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(side))
    out, settings, log = folder / f"{name}.jsonl", folder / f"{name}.side.json", folder / f"{name}.log"
    for old in (out, *folder.glob(f"{name}.rank*.jsonl")):
        old.unlink(missing_ok=True)
    what = {"engine": side.engine, "words": side.words, "stock": side.stock, "model": str(table.model), "tokens": table.tokens}
    write_whole(settings, json.dumps({**what, "contract": table.contract.to_json(), "temperature": temperature}).encode())
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | {"PYTHONWARNINGS": "ignore"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if side.engine == "megatron":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with log.open("wb") as said:
        done = subprocess.run(command(side, settings, out), env=environment, stdout=said, stderr=subprocess.STDOUT)
    parts = sorted(folder.glob(f"{name}.rank*.jsonl"))
    if done.returncode or not parts:
        raise SideFailed(f"{side}: ended with status {done.returncode}; {_last_line(log)} (all of it: {log})")
    _require_one_answer(side, parts)
    parts[0].replace(out)
    for part in parts[1:]:
        part.unlink()
    return out


def command(side: Side, settings: Path, out: Path) -> list[str]:
    """What runs a side."""
    module = ["-m", "tio_megatron.verify.matrix.side", str(settings), str(out)]
    if side.engine != "megatron":
        return [sys.executable, *module]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(side.ranks)]
    return [sys.executable, *torchrun, *module]


def _require_one_answer(side: Side, parts: Sequence[Path]) -> None:
    """Ranks that hold the same scores must have the same bytes of them."""
    first = parts[0].read_bytes()
    for part in parts[1:]:
        if part.read_bytes() != first:
            raise SideFailed(f"{side}: its ranks disagree about the log-probabilities ({parts[0].name}, {part.name})")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\s*(\[rank\d+\]: *)?\w*(Error|Exception)\b", line)]
    return (errors or lines or ["it said nothing"])[-1].strip()[:300]

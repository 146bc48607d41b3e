"""The elastic rows of ``make matrix-train``: a checkpoint written half-way in one layout resumes in another and ends with the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.qwen3_moe.training import Cut, Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron.grad_sums import sums_of
from tio_megatron.integrations.megatron.optimizer_state import optimizers
from tio_megatron.testing import run_ranks

PAIRS = (
    (parse("tp2+ep2"), parse("ep4", distributed_optimizer=True)),
    (parse("pp2"), parse("dp2", distributed_optimizer=True, micro_batch=2)),
    (parse("tp2+dp2+ep2", distributed_optimizer=True), parse("tp1", micro_batch=4)),
    (parse("cp2"), parse("tp2+ep1+etp2")),
    (parse("tp1", grouped=False), parse("pp2+dp2+ep2", distributed_optimizer=True)),
    (parse("tp4+ep2+etp2"), parse("cp2+ep2", packed=True, micro_batch=2)),
)
"""Written in the first, resumed in the second."""
QUICK = 2
"""The first of them belong to ``--quick``."""

LEFT_OUT = ("largest", "moments")
"""What the control forgets when it resumes; either must show."""


@dataclass(frozen=True)
class Resumed:
    """A run that changed its layout. ``left_out`` is what it forgot, empty for none; ``equal``: the bytes of the uninterrupted run."""

    written: Cut
    resumed: Cut
    step: int
    left_out: str
    sha256: str
    equal: bool
    seconds: float

    def row(self) -> dict[str, Any]:
        """For the report."""
        more = {"left_out": self.left_out} if self.left_out else {}
        names = {"layout": f"{self.written} -> {self.resumed}", "written": str(self.written), "resumed": str(self.resumed), "step": self.step}
        return names | more | {"sha256": self.sha256, "equal": self.equal, "seconds": self.seconds}


def run(
    recipe: Recipe, contract: Contract, folder: Path, wanted: str, pairs: Sequence[tuple[Cut, Cut]] = PAIRS, told: Callable[[str], None] = lambda what: None
) -> tuple[list[Resumed], list[Resumed]]:
    """Every pair, and the control: the first pair with something forgotten.

    Args:
        recipe: the training; checkpoints are written after half of its steps.
        contract: the order of every sum.
        folder: where checkpoints go.
        wanted: the digest of the uninterrupted run.
        pairs: layouts to write and to resume in.
        told: called with what begins.
    """
    step = recipe.steps // 2
    rows, control = [], []
    for number, (written, resumed) in enumerate(pairs):
        began = time.monotonic()
        place = folder / f"pair-{number}"
        told(f"{written} -> {resumed}")
        run_ranks(written.layout.ranks, _write, recipe, written, contract, step, place, timeout=900)
        for left_out in ("", *(LEFT_OUT if number == 0 else ())):
            if left_out:
                told(f"{resumed} without {left_out}")
            found = set(run_ranks(resumed.layout.ranks, _resume, recipe, resumed, contract, step, place, left_out, timeout=900))
            if len(found) != 1:
                raise RuntimeError(f"{resumed}: the ranks export different bytes: {sorted(found)}")
            sha256 = found.pop()
            outcome = Resumed(written, resumed, step, left_out, sha256, sha256 == wanted, round(time.monotonic() - began, 1))
            (control if left_out else rows).append(outcome)
            began = time.monotonic()
    return rows, control


def _write(rank: int, recipe: Recipe, cut: Cut, contract: Contract, step: int, place: Path) -> None:
    training = Training(recipe, cut, contract)
    while training.step_number < step:
        training.step()
    training.save(place)
    training.close()


def _resume(rank: int, recipe: Recipe, cut: Cut, contract: Contract, step: int, place: Path, left_out: str) -> str:
    training = Training(recipe, cut, contract)
    found = training.resume(place)
    if (found.step, training.step_number) != (step, step):
        raise RuntimeError(f"{place}: resumed at step {found.step}, data at {training.step_number}; both must be {step}")
    forget(training, left_out)
    while training.step_number < recipe.steps:
        training.step()
    sha256 = training.sha256()
    training.close()
    return sha256


def forget(training: Training, what: str) -> None:
    """Lose a part of what was loaded: ``largest`` or ``moments``; nothing when empty."""
    if what == "largest":
        for sums in sums_of([training.model]):
            for parameter in sums.parameters:
                parameter.largest = 0.0
            sums.reset()
    elif what == "moments":
        for part in optimizers(training.optimizer):
            for state in part.optimizer.state.values() if part.optimizer is not None else ():
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment].zero_()
    elif what:
        raise ValueError(f"forget: {what!r} is none of {', '.join(LEFT_OUT)}")

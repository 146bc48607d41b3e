"""The proof that training does not depend on how it is cut: one SHA-256 of everything trained per layout (``make matrix-train``).

Its elastic rows write a checkpoint half-way in one layout and resume it in another, and end with the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from examples.qwen3_moe.start import refuse
from examples.qwen3_moe.training import Cut, Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.files.whole import write_whole
from tio_megatron.integrations.megatron.resume.optimizer_state import optimizers
from tio_megatron.integrations.megatron.training.grad_sums import sums_of
from tio_megatron.jobs import folders
from tio_megatron.jobs.problems import InputProblem
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

MODEL = MOE | dict(num_hidden_layers=8, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=16, num_experts_per_tok=4)
"""Eight layers, four of sixteen experts, and 700 words: padded to 768, 768 and 1024 rows for TP 1, 2 and 4."""

ROWS = (
    parse("tp1"),
    parse("tp1", micro_batch=2),
    parse("tp1", micro_batch=4, recompute=True),
    parse("tp1", micro_batch=8, packed=True),
    parse("tp1", grouped=False, order="by length"),
    parse("dp2"),
    parse("dp2", micro_batch=4, distributed_optimizer=True),
    parse("dp2", micro_batch=2, order="interleaved", overlap=True, distributed_optimizer=True),
    parse("dp4", distributed_optimizer=True, order="by length"),
    parse("ep2", micro_batch=2),
    parse("ep2+allgather", order="interleaved"),
    parse("ep4", distributed_optimizer=True),
    parse("ep2+dp4+allgather", distributed_optimizer=True, recompute=True),
    parse("ep2", packed=True, micro_batch=4, order="by length"),
    parse("tp2+ep2"),
    parse("tp2+ep2+allgather", micro_batch=2),
    parse("tp2+ep1+etp2", micro_batch=4),
    parse("tp2+ep1+etp1", recompute=True),
    parse("tp2+ep2", packed=True, micro_batch=2),
    parse("tp4+ep4"),
    parse("tp4+ep2+etp2", micro_batch=2),
    parse("tp4+ep1+etp4", grouped=False),
    parse("tp4+ep1+etp1+allgather"),
    parse("tp2+dp2+ep4", order="interleaved"),
    parse("tp2+dp2+ep2+etp2+allgather", micro_batch=2, distributed_optimizer=True),
    parse("tp2+dp2+ep2", recompute=True, distributed_optimizer=True, overlap=True),
    parse("pp2"),
    parse("pp2+tp2+ep2", micro_batch=2),
    parse("pp2+dp2+ep2", distributed_optimizer=True, recompute=True),
    parse("pp2", packed=True, micro_batch=2),
    parse("cp2"),
    parse("cp2+ep2", micro_batch=2),
    parse("cp2+tp2+ep2", order="interleaved"),
    parse("cp2+dp2+ep4", distributed_optimizer=True),
    parse("cp2", packed=True, micro_batch=4),
    parse("cp4+ep1+etp1+allgather", recompute=True),
)
QUICK = (0, 3, 6, 10, 14, 17, 24, 31)
"""Rows of ``--quick``, four ranks at most; so is ``QUICK_AUX``."""

AUX_LOSS = 0.02
ROWS_AUX = (
    parse("tp1"),
    parse("tp1", micro_batch=4, recompute=True),
    parse("tp1", micro_batch=8, packed=True),
    parse("dp2", micro_batch=2, order="interleaved", overlap=True, distributed_optimizer=True),
    parse("tp2+ep2+allgather", micro_batch=2),
    parse("pp2", packed=True, micro_batch=2),
    parse("cp2+tp2+ep2", order="interleaved"),
    parse("cp2", packed=True, micro_batch=4),
)
"""The same training with the sequence-wise auxiliary loss, by a coefficient of ``AUX_LOSS``."""
QUICK_AUX = (0, 2, 4)

CONTROL = (parse("tp1", grouped=False), parse("tp2+ep2", grouped=False))
"""The stock packages, unpatched: two layouts that should give the same."""

PAIRS = (
    (parse("tp2+ep2"), parse("ep4", distributed_optimizer=True)),
    (parse("pp2"), parse("dp2", distributed_optimizer=True, micro_batch=2)),
    (parse("tp2+dp2+ep2", distributed_optimizer=True), parse("tp1", micro_batch=4)),
    (parse("cp2"), parse("tp2+ep1+etp2")),
    (parse("tp1", grouped=False), parse("pp2+dp2+ep2", distributed_optimizer=True)),
    (parse("tp4+ep2+etp2"), parse("cp2+ep2", packed=True, micro_batch=2)),
)
"""Written in the first, resumed in the second."""
QUICK_PAIRS = 2
"""The first of them belong to ``--quick``."""

LEFT_OUT = ("largest", "moments")
"""What the control forgets when it resumes; either must show."""

TABLES = ((ROWS, QUICK), (ROWS_AUX, QUICK_AUX))


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    cut: Cut
    sha256: str
    first_loss: float
    last_loss: float
    last_norm: float
    seconds: float

    def row(self) -> dict[str, Any]:
        """For the report."""
        return {"layout": str(self.cut), "sha256": self.sha256, "loss": [self.first_loss, self.last_loss], "grad_norm": self.last_norm, "seconds": self.seconds}


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


def run(recipe: Recipe, cut: Cut, contract: Contract | None, timeout: float = 900.0) -> Outcome:
    """Train in one layout; every rank is a process."""
    began = time.monotonic()
    results = run_ranks(cut.layout.ranks, _rank, recipe, cut, contract, timeout=timeout)
    digests = {sha for sha, _, _ in results}
    if len(digests) != 1:
        raise RuntimeError(f"{cut}: the ranks export different bytes: {sorted(digests)}")
    losses = [found for _, found, _ in results if any(found)]
    mean = [sum(each) / len(losses) for each in zip(*losses, strict=True)]
    return Outcome(cut, digests.pop(), mean[0], mean[-1], results[0][2], round(time.monotonic() - began, 1))


def _rank(rank: int, recipe: Recipe, cut: Cut, contract: Contract | None) -> tuple[str, list[float], float]:
    training = Training(recipe, cut, contract)
    steps = [training.step() for _ in range(recipe.steps)]
    found = training.sha256(), [loss for loss, _ in steps], steps[-1][1]
    training.close()
    return found


def run_pairs(
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table and the elastic rows. Status 0 when all are equal and the controls differ, 2 for a folder that cannot be had, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Example: python -m examples.qwen3_moe.matrix_train --quick")
    parser.add_argument("--steps", type=int, default=20, help="Adam steps (default: 20)")
    parser.add_argument("--quick", action="store_true", help="a few of the rows")
    parser.add_argument("--rows", help="only rows whose layout contains this text")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and activations (default: bfloat16)")
    parser.add_argument("--no-control", action="store_true", help="leave the stock packages out")
    parser.add_argument("--no-elastic", action="store_true", help="leave out the runs that change their layout half-way (--rows does too)")
    parser.add_argument("--out", type=Path, default=Path("out/matrix-train"), help="folder of report.json (default: out/matrix-train)")
    options = parser.parse_args(arguments)
    chosen, chosen_aux = (
        [table[i] for i in quick] if options.quick else [cut for cut in table if not options.rows or options.rows in str(cut)] for table, quick in TABLES
    )
    if options.steps < 1 or not chosen:
        parser.error("there must be at least one step and one row")
    console = Console()
    torch.set_num_threads(1)
    try:
        folders.require_writable(options.out, "--out")
        with folders.claimed(options.out):
            return _tables(console, options, chosen, chosen_aux)
    except (InputProblem, OSError) as problem:
        return refuse(problem)


def _tables(console: Console, options: argparse.Namespace, chosen: Sequence[Cut], chosen_aux: Sequence[Cut]) -> int:
    with tempfile.TemporaryDirectory(prefix="tio-matrix-") as folder:
        model = write_tiny(Path(folder) / "model", MODEL, torch_dtype=options.dtype)
        recipe = Recipe(model, steps=options.steps)
        contract = Contract(grain=32)
        rows = _run_all(console, recipe, chosen, contract, "rows")
        rows_aux = _run_all(console, replace(recipe, aux_loss=AUX_LOSS), chosen_aux, contract, "with auxiliary loss")
        control = [] if options.no_control else _run_all(console, recipe, CONTROL, None, "stock")
        pairs = PAIRS[:QUICK_PAIRS] if options.quick else PAIRS
        pairs = () if options.no_elastic or options.rows or options.steps < 2 else pairs
        resumed, forgetful = _run_elastic(console, recipe, contract, Path(folder), rows[0].sha256, pairs)
    _show(console, {"": rows, "auxiliary loss: ": rows_aux, "stock: ": control})
    _show_elastic(console, resumed, forgetful)
    same, same_aux = _most(rows), _most(rows_aux)
    no_effect = bool(rows_aux) and rows_aux[0].sha256 == rows[0].sha256
    equal = same == len(rows) and same_aux == len(rows_aux) and not no_effect
    differs = not control or len({outcome.sha256 for outcome in control}) > 1
    report = {
        "rows": [outcome.row() for outcome in rows],
        "rows_aux": [outcome.row() for outcome in rows_aux],
        "control": [outcome.row() for outcome in control],
        "elastic": [outcome.row() for outcome in resumed],
        "elastic_control": [outcome.row() for outcome in forgetful],
        "equal": equal,
        "steps": options.steps,
        "contract": json.loads(contract.to_json()),
        "fingerprint": contract.fingerprint(),
        "model": MODEL | {"torch_dtype": options.dtype},
    }
    write_whole(options.out / "report.json", json.dumps(report, indent=1).encode())
    stock = "not run" if not control else "differ" if differs else "are equal: no control"
    last = f"{same} of {len(rows)} layouts train to the same bytes ({options.steps} steps, {rows[0].sha256[:16]})"
    if rows_aux:
        last += f"; {same_aux} of {len(rows_aux)} with the auxiliary loss ({rows_aux[0].sha256[:16]}{', which has no effect' if no_effect else ''})"
    last += f"; stock layouts {stock}"
    console.print(last, soft_wrap=True)
    whole = all(outcome.equal for outcome in resumed) and not any(outcome.equal for outcome in forgetful)
    if resumed:
        missed = ", ".join(f"{outcome.left_out} {'does not show' if outcome.equal else 'shows'}" for outcome in forgetful)
        count = sum(outcome.equal for outcome in resumed)
        last = f"{count} of {len(resumed)} runs that change their layout at step {resumed[0].step} end with those bytes; left out on purpose: {missed}"
        console.print(last, soft_wrap=True)
    return 0 if equal and differs and whole else 1


def _run_all(console: Console, recipe: Recipe, cuts: Sequence[Cut], contract: Contract | None, what: str) -> list[Outcome]:
    found = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=len(cuts))
        for cut in cuts:
            progress.update(task, description=str(cut))
            found.append(run(recipe, cut, contract))
            console.print(f"{found[-1].sha256}  {'' if what == 'rows' else what + ': '}{cut}", soft_wrap=True, highlight=False)
            progress.advance(task)
    return found


def _run_elastic(
    console: Console, recipe: Recipe, contract: Contract, folder: Path, wanted: str, pairs: Sequence[tuple[Cut, Cut]]
) -> tuple[list[Resumed], list[Resumed]]:
    if not pairs:
        return [], []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("elastic", total=len(pairs) + len(LEFT_OUT))

        def told(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                console.print(what, soft_wrap=True, highlight=False)
            progress.advance(task)

        return run_pairs(recipe, contract, folder, wanted, pairs, told)


def _show_elastic(console: Console, rows: Sequence[Resumed], control: Sequence[Resumed]) -> None:
    if not rows:
        return
    table = Table("written in", "resumed in", "seconds", "", "sha256 of weights, main parameters and moments")
    for outcome in (*rows, *control):
        verdict = "same bytes" if outcome.equal else "other bytes"
        where = f"{outcome.resumed}{f', without {outcome.left_out}' if outcome.left_out else ''}"
        table.add_row(str(outcome.written), where, str(outcome.seconds), verdict, outcome.sha256[:16])
    console.print(table)


def _most(rows: Sequence[Outcome]) -> int:
    """How many have one digest."""
    return max((sum(o.sha256 == r.sha256 for o in rows) for r in rows), default=0)


def _show(console: Console, groups: Mapping[str, Sequence[Outcome]]) -> None:
    table = Table("layout", "loss", "norm", "seconds", "sha256 of weights, main parameters and moments")
    for mark, outcome in [(mark, outcome) for mark, rows in groups.items() for outcome in rows]:
        loss = f"{outcome.first_loss:.3f} to {outcome.last_loss:.3f}"
        table.add_row(f"{mark}{outcome.cut}", loss, f"{outcome.last_norm:.4f}", str(outcome.seconds), outcome.sha256[:16])
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

"""``tio diagnose A B``, and ``tio diagnose BUNDLE``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tio_megatron.commands.answer import JSON, tell

EPILOG = "Example: tio diagnose trainer.trace rollout.trace"


def diagnose(
    a: Annotated[Path, typer.Argument(metavar="A", help="Trace of one side, as tio record writes it; or a monitor's bundle, alone.")],
    b: Annotated[Path | None, typer.Argument(metavar="[B]", help="Trace of the other side, over the same tokens.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Name the first point at which two traces differ, the kind of cause, and what to change.

    Of a monitor's bundle: what differs, and how to record the two traces that say why.
    Exit status: 0 equal, 1 differs, 2 could not tell (no known cause, other tokens, other models, no trace). Every cause has a section in docs/divergence.md.
    """

    def work() -> tuple[int, dict[str, Any], Callable[[Console], None]]:
        if b is None:
            if (a / "trace.json").exists():
                raise ValueError(f"{a}: one trace; two are compared: tio diagnose {a} OTHER.trace (alone goes only a monitor's bundle)")
            return _bundle(a)
        from tio_megatron.traces import open_trace
        from tio_megatron.verify.diagnosis import diagnose as compare
        from tio_megatron.verify.diagnosis.finding import KINDS

        found = compare(open_trace(a), open_trace(b))

        def show(console: Console) -> None:
            console.print(found.verdict, style="green" if found.status == 0 else "bold red", highlight=False, soft_wrap=True)
            said = [KINDS[found.kind]] if found.kind != "equal" else []
            if found.first:
                said.append(f"{found.rows} tokens differ there, first token {found.first[1]} of sequence {found.first[0]}")
            for line in (*said, *found.evidence):
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
            if found.kind != "equal":
                console.print(f"  side: {found.side or 'none'} ({found.side_reason})", markup=False, highlight=False, soft_wrap=True)
            for line in found.routing:
                console.print(f"  routing: {line}", markup=False, highlight=False, soft_wrap=True)
            if found.cure:
                console.print(f"To change: {found.cure}", style="bold", markup=False, highlight=False, soft_wrap=True)
            if found.cause:
                console.print(f"More: docs/divergence.md#{found.cause}", markup=False, highlight=False)

        return found.status, found.to_json(), show

    tell("diagnose", as_json, work)


def _bundle(folder: Path) -> tuple[int, dict[str, Any], Callable[[Console], None]]:
    """Log-probabilities say that and how two sides differ, not where it starts: that takes traces over the bundle's tokens."""
    from tio_megatron.verify.logdiff import logdiff
    from tio_megatron.verify.monitor import not_finite, read_bundle
    from tio_megatron.verify.picture import numbers
    from tio_megatron.verify.readers import read_scored

    bundle = read_bundle(folder)
    broken = not_finite(bundle)
    places = [place for side in broken.values() for place in side]
    found = None if places else logdiff(read_scored(bundle.trainer), read_scored(bundle.rollout))
    tokens = bundle.rollout if broken["trainer"] and not broken["rollout"] else bundle.trainer
    following = [
        f"tio record MODEL trainer.trace --engine megatron --tokens {tokens} --keep all     # with the run's own layout and options",
        f"tio record MODEL rollout.trace --engine vllm --tokens {tokens} --keep all",
        "tio diagnose trainer.trace rollout.trace",
    ]

    def show(console: Console) -> None:
        verdict = f"; {found.verdict}" if found else ""
        console.print(f"step {bundle.about.get('step')}: {bundle.about.get('reason')}{verdict}", highlight=False, markup=False, soft_wrap=True)
        for line in (f"{name}: {value}" for name, value in numbers(found)) if found else places:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        console.print("Where it starts and why, with the model at hand:", style="bold")
        for line in following:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)

    answer = {"bundle": dict(bundle.about), "logdiff": found.to_json() if found else None, "not_finite": places, "next": following}
    return found.status if found else 1, answer, show

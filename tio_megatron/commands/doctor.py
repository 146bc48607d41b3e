"""``tio doctor``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tio_megatron.commands.answer import JSON, tell
from tio_megatron.commands.tables import show_rows
from tio_megatron.models import EXAMPLE

EPILOG = f'Example: tio doctor --model {EXAMPLE} --rollout "--tensor-parallel-size 4 --enable-expert-parallel" --run -- bash train.sh'
LAYOUT = "Words (tp2+ep2), arguments in quotes, or a file: YAML or JSON of arguments, a verl configuration."
COLOURS = {"ok": "green", "note": "default", "unknown": "yellow", "bad": "red"}


def doctor(
    model: Annotated[str | None, typer.Option(help=f"HF folder, config.json, or a known name such as {EXAMPLE}.")] = None,
    trainer: Annotated[str | None, typer.Option(help=f"Megatron's layout and options. {LAYOUT}")] = None,
    rollout: Annotated[str | None, typer.Option(help="vLLM's, in the same ways (words: tp2+ep).")] = None,
    contract: Annotated[
        str | None,
        typer.Option(help="The contract both sides load, as TIO_CONTRACT takes it (default: that of TIO_CONTRACT here, else the smallest that serves both)."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or npu: where it will run; whose environment variables, kernels and options to look at.")] = "cpu",
    stock: Annotated[bool, typer.Option("--stock", help="Look at stock packages, without the contract.")] = False,
    score_only: Annotated[bool, typer.Option("--score-only", help="The trainer computes no gradients.")] = False,
    module: Annotated[list[str] | None, typer.Option("--import", metavar="MODULE", help="Import this first, as the run does; may be repeated.")] = None,
    workers: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Look at the workers of a job that was started with TIO_HANDSHAKE=FOLDER, running or ended, and at nothing else."),
    ] = None,
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", help="With --run: what starts the run.", show_default=False)] = None,
    run: Annotated[bool, typer.Option("--run", help="Run COMMAND with recording stand-ins for python, torchrun, vllm, ..., and judge what it starts.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --run: do not ask.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Look at this environment, and at a configuration, before any run; with --workers at what every worker of a run says of itself.

    Versions, environment variables that move an order of sums, whose code stands at the symbols that are patched; and for a model and two layouts
    whether one contract can hold, or which product forbids it and which layouts near by work. Nothing is started, but for COMMAND's own lines with --run.
    Exit status: 0 it can hold, 1 something forbids it, 2 could not tell.
    """

    def work() -> tuple[int, dict[str, Any], Callable[[Console], None]]:
        from tio_megatron.verify.doctor import examine, of_workers, worst

        if device not in ("cpu", "cuda", "npu"):
            raise ValueError(f"--device {device}: cpu, cuda or npu")
        if workers is not None:
            other = {"--run": run, "--model": model, "--trainer": trainer, "--rollout": rollout, "--stock": stock, "--import": module}
            if given := [name for name, value in other.items() if value]:
                raise ValueError(f"--workers and {' and '.join(given)}: the workers of a run are looked at alone (--contract and --device go with them)")
            found = of_workers(workers, device, contract)
        else:
            if bool(command) != run:
                raise ValueError("--run -- COMMAND: a command, and --run in front of it, go together")
            sides = {"trainer": trainer, "rollout": rollout}
            environ = _recorded(command, sides, yes) if command else None
            found = examine(
                model=model,
                **sides,
                environ=environ,
                contract=contract,
                device=device,
                plugged=not stock,
                training=not score_only,
                modules=module or (),
            )
        level = worst(found.findings)
        status = {"ok": 0, "note": 0, "unknown": 2, "bad": 1}[level]
        fit = found.fit
        answer: dict[str, Any] = {"findings": [finding.to_dict() for finding in found.findings], "level": level}
        if fit is not None:
            answer |= {"contract": fit.contract.to_dict(), "fingerprint": fit.contract.fingerprint(), "nearest": [[str(a), str(b)] for a, b in fit.nearest]}

        def show(console: Console) -> None:
            rows = [(finding.level, finding.topic, finding.what, finding.works) for finding in found.findings]
            show_rows(console, ("", "topic", "found", "what works"), rows, styles=[COLOURS[finding.level] for finding in found.findings])
            if fit is not None and fit.nearest:
                near = [(str(left), str(right)) for left, right in fit.nearest]
                show_rows(console, ("trainer", "rollout"), near, title="layouts near by that work")
            bad = sum(finding.level == "bad" for finding in found.findings)
            ended = {0: "nothing forbids it", 1: f"{bad} {'thing forbids' if bad == 1 else 'things forbid'} it", 2: "could not tell everything"}[status]
            if workers is not None:
                ended = {0: "all workers run the same", 1: f"{bad} {'thing keeps' if bad == 1 else 'things keep'} the contract from holding", 2: ended}[status]
            console.print(ended, style="green" if status == 0 else "red", highlight=False)

        return status, answer, show

    tell("doctor", as_json, work)


def _recorded(command: list[str], sides: dict[str, str | None], yes: bool) -> Mapping[str, str] | None:
    """Run ``command`` and fill in the sides that were not given; the environment in which they were started."""
    from tio_megatron.verify.doctor import recorded

    if not yes and not sys.stdin.isatty():
        raise ValueError(f"--run: {recorded.WARNING}; --yes where nobody can be asked")
    if not yes and not typer.confirm(f"{recorded.WARNING}. Run it?", err=True):
        raise ValueError("--run: not run")
    started, status = recorded.record(command)
    found = {side: recorded.of_side(started, side) for side, given in sides.items() if given is None}
    if missing := [side for side, one in found.items() if one is None]:
        ended = f" (it ended with status {status})" if status else ""
        raise ValueError(f"--run: {len(started)} programs were started{ended}, and none of them is a {' or a '.join(missing)}: --{missing[0]} names it")
    sides |= {side: shlex.join(one.words) for side, one in found.items() if one is not None}
    return next((one.environment for one in found.values() if one is not None), None)

"""``tio plan``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tio_megatron.commands.answer import JSON, tell
from tio_megatron.commands.doctor import LAYOUT
from tio_megatron.commands.tables import show_rows
from tio_megatron.models import EXAMPLE

EPILOG = f"Example: tio plan --model {EXAMPLE} --trainer tp4+pp2+cp2+ep8+etp1 --rollout tp4+ep --out contract.json"


def plan(
    model: Annotated[str, typer.Option(help=f"HF folder, config.json, or a known name such as {EXAMPLE}.")],
    trainer: Annotated[str, typer.Option(help=f"Megatron's layout. {LAYOUT}")],
    rollout: Annotated[str, typer.Option(help="vLLM's, in the same ways (words: tp2+ep).")],
    tokens: Annotated[int, typer.Option(help="Tokens of one micro-batch of the trainer.")] = 4096,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of one data-parallel rank in a step.")] = 1,
    requests: Annotated[int, typer.Option(help="Requests that decode together, one token each a step.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda or npu: whose kernels the contract is for.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the contract there: TIO_CONTRACT of both sides.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """The smallest contract that serves both layouts, and what it costs beside the stock packages.

    Bytes are payload that one rank sends, of what is added between ranks; what only moves is the same on both sides. No card is used.
    Exit status: 0 there is one, 1 there is none (with the layouts near by that have one), 2 could not tell.
    """

    def work() -> tuple[int, dict[str, Any], Callable[[Console], None]]:
        from tio_megatron.files.whole import write_whole
        from tio_megatron.verify import costs
        from tio_megatron.verify.doctor import fit, held, settings, shape_of

        if min(tokens, requests, micro_batches) < 1:
            raise ValueError(f"--tokens, --requests and --micro-batches must be at least 1, got {tokens}, {requests} and {micro_batches}")
        if device not in ("cpu", "cuda", "npu"):
            raise ValueError(f"--device {device}: cpu, cuda or npu")
        shape, left, right = shape_of(model), settings.trainer(trainer), settings.rollout(rollout)
        train, serve = left.layout.layout, right.layout.layout
        found = fit(shape, train, serve, family=held.of_device(device))
        bad = [finding for finding in found.findings if finding.level == "bad"]
        if bad:

            def refuse(console: Console) -> None:
                for finding in bad:
                    console.print(f"{finding.what}; {finding.works}", style="red", highlight=False, soft_wrap=True)
                for near, by in found.nearest:
                    console.print(f"would work: trainer {near}, rollout {by}", highlight=False)

            nearest = [[str(a), str(b)] for a, b in found.nearest]
            return 1, {"findings": [finding.to_dict() for finding in bad], "nearest": nearest}, refuse
        contract = found.contract
        dispatcher = getattr(left.layout, "dispatcher", "alltoall")
        sides = {
            f"trainer, {tokens} tokens": costs.training(contract, shape, train, tokens, dispatcher) + costs.memory(shape, train),
            f"rollout, {requests} tokens": costs.rollout(contract, shape, serve, requests),
        }
        totals = {
            "trainer": costs.total(next(iter(sides.values())), shape, train, tokens, micro_batches),
            "rollout": costs.total(list(sides.values())[1], shape, serve, requests),
        }
        launches = {"trainer": costs.operators(shape, train), "rollout": costs.operators(shape, serve, serving=True)}
        if out:
            write_whole(out, (contract.to_json() + "\n").encode())

        def show(console: Console) -> None:
            cuts = ", ".join(f"{name} {count}" for name, count in contract.to_dict()["cuts"].items())
            console.print(f"contract {contract.fingerprint()} (family {contract.family}; {cuts})", highlight=False, soft_wrap=True)
            for side, rows in sides.items():
                cells = [(r.what, r.per, size(r.ours), size(r.stock), f"{r.ours / r.stock:.2f}" if r.stock else "", r.why) for r in rows]
                if cells:
                    show_rows(console, ("what", "per", "ours", "stock", "ratio", "why"), cells, title=side)
                else:
                    console.print(f"{side}: no sum crosses ranks, nothing is added")
            for side, found in totals.items():
                console.print(
                    f"{side}: {size(found.extra)} more than stock in a step of {found.tokens} tokens ({size(found.ours)}, stock {size(found.stock)}), "
                    f"{size(round(found.extra_per_token))} a token",
                    highlight=False,
                    soft_wrap=True,
                )
            for side, (count, sums) in launches.items():
                console.print(f"{side}: {count} operators and {sums} {'sum' if sums == 1 else 'sums'} between ranks in a layer's forward pass", highlight=False)
            if out:
                console.print(f"both sides: export TIO_CONTRACT={out}", highlight=False, soft_wrap=True)

        answer = {
            "contract": contract.to_dict(),
            "fingerprint": contract.fingerprint(),
            "costs": {side: [{"what": r.what, "per": r.per, "ours": r.ours, "stock": r.stock, "why": r.why} for r in rows] for side, rows in sides.items()},
            "totals": {
                side: {"ours": t.ours, "stock": t.stock, "extra": t.extra, "extra_per_token": t.extra_per_token, "tokens": t.tokens}
                for side, t in totals.items()
            },
            "operators": {side: {"operators": count, "sums": sums} for side, (count, sums) in launches.items()},
        }
        return 0, answer, show

    tell("plan", as_json, work)


def size(count: int) -> str:
    """Bytes for people.

    >>> size(3 << 20)
    '3.0 MiB'
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"

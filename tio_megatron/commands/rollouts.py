"""``tio rollouts``: look into a store of rollouts, check it, fill it, draw from it, score it again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tio_megatron.commands.answer import JSON, tell
from tio_megatron.commands.tables import counted, show_rows

app = typer.Typer(name="rollouts", help="Stores of rollouts: show, verify, import, sample, replay.", no_args_is_help=True)

STORE = typer.Argument(metavar="STORE", help="Folder of a store.")
Answer = tuple[int, dict[str, Any], Callable[[Console], None]]


@app.command(epilog="Example: tio rollouts show out/rl/rollouts")
def show(store: Annotated[Path, STORE], as_json: Annotated[bool, JSON] = False) -> None:
    """List the batches: step, sequences, weights, contract, where from. Exit status: 0, or 2 when it cannot be read."""

    def work() -> Answer:

        from tio_megatron.rollouts import Store

        opened = Store.open(store)
        rows = []
        for number, batch in enumerate(opened):
            about = batch.about
            mean = None if batch.rewards is None else float(batch.rewards.mean())
            scored = batch.logprobs is not None
            rows.append(
                {"batch": number, "step": about.step, "rollouts": len(batch), "sampled_tokens": int((batch.lengths - batch.prompts).sum()), "scored": scored}
                | {"reward": mean, "temperature": about.temperature, "weights": about.weights, "contract": about.contract, "source": about.source}
            )
        answer = {"batches": rows, "rollouts": len(opened), "head": opened.head}

        def text(console: Console) -> None:
            cells = [["" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
            show_rows(console, [*rows[0]] if rows else (), cells)
            console.print(f"{counted(len(rows), 'batch', 'batches')}, {counted(len(opened), 'rollout', 'rollouts')}, head {opened.head[:16]}", highlight=False)

        return 0, answer, text

    tell("rollouts show", as_json, work)


@app.command(epilog="Example: tio rollouts verify out/rl/rollouts --head 5f1c0e7a9b2d4c68")
def verify(
    store: Annotated[Path, STORE],
    head: Annotated[str | None, typer.Option(help="A head that was noted earlier: everything it stood for must still be there.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Read every byte and compare all digests. Exit status: 0, or 2 with the first thing that is damaged, edited or gone."""

    def work() -> Answer:
        from tio_megatron.rollouts import Store

        audit = Store.open(store).verify(head)
        held = f"{counted(audit.batches, 'batch', 'batches')}, {counted(audit.sequences, 'rollout', 'rollouts')}"
        line = f"{held}, {audit.sampled} sampled tokens: whole; head {audit.head[:16]}"
        return 0, vars(audit), lambda console: console.print(line, highlight=False)

    tell("rollouts verify", as_json, work)


@app.command(name="import", epilog="Example: tio rollouts import rollout_data/ STORE --weights 0123456789abcdef --temperature 1.0")
def import_(
    dump: Annotated[Path, typer.Argument(metavar="DUMP", help="What verl wrote to trainer.rollout_data_dir: a .jsonl file, or the folder.")],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a store; made if it is not there.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, for dumps that hold text alone.")] = None,
    logprobs: Annotated[str | None, typer.Option(help="Field with the log-probabilities (rollout_log_probs).")] = None,
    weights: Annotated[str, typer.Option(help="Digest of the weights that sampled, if known.")] = "",
    contract: Annotated[str, typer.Option(help="Fingerprint of the contract, if there was one.")] = "",
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Append verl's rollout dumps to a store. All files are read before anything is written. Exit status: 0, or 2 when something could not be read."""

    def work() -> Answer:
        from tio_megatron.rollouts import About, Store, from_verl

        encode = None
        if tokenizer is not None:
            from tokenizers import Tokenizer

            if not tokenizer.is_file():
                raise ValueError(f"{tokenizer}: no such file; name a tokenizer.json")
            try:
                held = Tokenizer.from_file(str(tokenizer))
            except Exception as error:  # the library raises no narrower one
                raise ValueError(f"{tokenizer}: no tokenizer.json ({error})") from error
            encode = lambda text: list(held.encode(text, add_special_tokens=False).ids)  # noqa: E731
        about = About(contract=contract, weights=weights, temperature=temperature)
        batches = list(from_verl(dump, about, encode=encode, logprobs=logprobs))
        opened = Store.open(store) if (store / "store.json").exists() else Store.create(store)
        for batch in batches:
            opened.append(batch)
        count = sum(map(len, batches))
        taken = f"{counted(len(batches), 'batch', 'batches')}, {counted(count, 'rollout', 'rollouts')}"
        line = f"{taken} imported; the store has {opened.batches} and {len(opened)}"
        return 0, {"batches": len(batches), "rollouts": count}, lambda console: console.print(line, highlight=False)

    tell("rollouts import", as_json, work)


@app.command(epilog="Example: tio rollouts sample out/rl/rollouts --count 64 --seed 7 --by reward --out batch.jsonl")
def sample(
    store: Annotated[Path, STORE],
    count: Annotated[int, typer.Option(min=1, help="How many.")],
    seed: Annotated[int, typer.Option(help="Decides the draw; the same on every machine.")],
    by: Annotated[str, typer.Option(help="uniform, or reward: as likely as its reward (prioritised).")] = "uniform",
    newest: Annotated[int | None, typer.Option(min=1, help="Only from that many newest batches.")] = None,
    once: Annotated[bool, typer.Option("--once", help="No rollout twice.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the rollouts as JSON lines, which tio logdiff and tio record read.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Draw rollouts: the places of the draw, and with --out the rollouts. Exit status: 0, or 2 when there are too few."""

    def work() -> Answer:
        import numpy as np

        from tio_megatron.files.whole import write_whole
        from tio_megatron.rollouts import Store, StoreError

        opened = Store.open(store)
        weights = None
        if by == "reward":
            rewards = [batch.rewards for batch in opened]
            without = next((number for number, row in enumerate(rewards) if row is None), None)
            if without is not None:
                raise StoreError(f"{store}: batch {without} has no rewards; --by uniform would work")
            weights = np.concatenate([row for row in rewards if row is not None]) if rewards else np.zeros(0)
        elif by != "uniform":
            raise StoreError(f"--by {by}: uniform or reward")
        drawn = opened.sample(count, seed, weights=weights, replace=not once, newest=newest)
        if out is not None:
            lines = []
            for one in opened.gather(drawn.places.tolist()):
                held = {"tokens": one.tokens.tolist()} | ({} if one.logprobs is None else {"logprobs": one.logprobs.tolist()})
                lines.append(json.dumps(held | ({} if one.rewards is None else {"reward": float(one.rewards[0])})) + "\n")
            write_whole(out, "".join(lines).encode())
        answer = {"places": drawn.places.tolist(), "probabilities": drawn.probabilities.tolist()}
        return 0, answer, lambda console: console.print(" ".join(map(str, answer["places"])), highlight=False)

    tell("rollouts sample", as_json, work)


@app.command(epilog='Example: tio rollouts replay out/rl/rollouts MODEL "megatron tp2+ep2" --batch 0')
def replay(
    store: Annotated[Path, STORE],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the HF checkpoint that sampled.")],
    side: Annotated[str, typer.Argument(metavar="SIDE", help='Engine and layout: "megatron tp2+ep2", "vllm tp2", "stock megatron tp1".')] = "megatron tp1",
    batch: Annotated[list[int] | None, typer.Option(help="This batch (again for more); by default all that MODEL's weights sampled.")] = None,
    contract: Annotated[str, typer.Option(help="As TIO_CONTRACT; by default the one that is written in the store.")] = "",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Score stored rollouts again, in any layout, and compare the bytes.

    Exit status: 0 every log-probability has the stored bytes, 1 some have not, 2 could not tell (other weights, another contract, no log-probabilities).
    """

    def work() -> Answer:
        from tio_megatron.rollouts import Batch, Store
        from tio_megatron.verify.replay import replay as compare
        from tio_megatron.verify.replay import scorer, weights_of

        opened, digest = Store.open(store), weights_of(model)
        chosen = batch or [number for number, about in enumerate(opened.abouts) if about.weights == digest]
        if not chosen:
            theirs = sorted({about.weights or "unknown" for about in opened.abouts})
            raise ValueError(f"{store}: no batch was sampled by {model} ({digest}); the weights there are {', '.join(theirs) or 'none'}")

        def batches() -> Iterator[Batch]:
            return (opened.batch(number) for number in chosen)

        with tempfile.TemporaryDirectory(prefix="tio-replay-") as folder:
            found = compare(batches(), scorer(model, side, contract, Path(folder)), weights=digest)
        verdict = "the stored bytes" if found.same else f"{found.differ} differ, max {found.max_abs:.3g}; first: {found.first}" if found.tokens else "no token"
        line = f"{found.tokens} tokens of {counted(found.batches, 'batch', 'batches')} scored again by {side}: {verdict}"
        return (0 if found.same else 1 if found.tokens else 2), vars(found), lambda console: console.print(line, highlight=False, soft_wrap=True)

    tell("rollouts replay", as_json, work)

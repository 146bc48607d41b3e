"""``tio record MODEL TRACE``."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tio_megatron.commands.answer import JSON, tell
from tio_megatron.models import EXAMPLE

EPILOG = f"Example: tio record {EXAMPLE} hf.trace --engine hf --tokens rollout.jsonl --keep all"


class Engine(StrEnum):
    """Who runs the model."""

    hf = "hf"
    megatron = "megatron"
    vllm = "vllm"


def require_fit(
    engine: Engine, *, dtype: str, batch: int, layout: str | None, tp: int | None, ep: int | None, sp: bool, stock: bool, temperature: float
) -> None:
    """Refuse options that ``engine`` would not look at: the trace would be of something else than was asked for. None is an option that was not given.

    Raises:
        ValueError: names the option and the engines that have it.
    """
    small = {"--tp": tp, "--ep": ep, "--sp": sp or None}
    said = [name for name, value in small.items() if value is not None]
    if engine is Engine.hf:
        said += ["--layout"] * (layout is not None) + ["--stock"] * stock
        if said:
            raise ValueError(f"{', '.join(said)}: --engine hf runs the whole model in one process, as it is; --engine megatron and --engine vllm have layouts")
        return
    if layout is not None and said:
        raise ValueError(f"--layout {layout} and {', '.join(said)}: both say how the model is cut; give one of them")
    if batch != 1:
        raise ValueError(f"--batch {batch}: --engine {engine} is given one sequence a pass; --engine hf has batches")
    if engine is Engine.megatron:
        if dtype:
            raise ValueError(f"--dtype {dtype}: --engine megatron computes in the type of the checkpoint; --engine hf and --engine vllm take another")
        if sp and (tp or 1) == 1:
            raise ValueError("--sp: sequence parallelism needs ranks of tensor parallelism, --tp 2 or more")
        return
    if sp:
        raise ValueError("--sp: --engine vllm has no sequence parallelism; --engine megatron has")
    if ep is not None and ep not in (1, tp or 1):
        raise ValueError(f"--ep {ep}: vLLM spreads experts over the --tp ranks, so 1 or {tp or 1} would work")
    if temperature != 1.0:
        raise ValueError(
            f"--temperature {temperature:g}: vLLM scores prompts without a temperature, so 1 is the only one; --engine hf and megatron have others"
        )


def require_known(keep: Sequence[str], model: Path) -> None:
    """Refuse a word of ``--keep`` that no point and no parameter of the model has in its name: after a long run it would have kept nothing.

    Raises:
        ValueError: names the word and the nearest that would work.
    """
    from tio_megatron.files.safe_file import SafeFile
    from tio_megatron.traces.scored import keeper

    names = _points_of(model)
    for file in sorted(model.glob("*.safetensors")):
        with SafeFile(file) as held:
            names |= set(held.entries)
    for word in keep:
        if word == "all" or any(map(keeper([word]), names)):
            continue
        layers = re.compile(r"(?<=layers\.)\d+")
        alike = [name for name in names if layers.sub("0", name) == layers.sub("0", word)]
        if alike:
            count = len({name.split("layers.")[1].split(".")[0] for name in names if "layers." in name})
            raise ValueError(f"--keep {word}: the model has layers 0 to {count - 1}; {max(alike, key=natural)} would work")
        known = names | {name.rsplit(".", 1)[-1] for name in names if not name.endswith(".weight")}
        near = difflib.get_close_matches(word, sorted(known, key=natural), 3, 0.6) or ["attn", "expert_out", "logits", "layers.0.o_proj", "all"]
        raise ValueError(f"--keep {word}: no point and no parameter of the model has this in its name; {' or '.join(near)} would work")


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 9 before layer 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def _points_of(model: Path) -> set[str]:
    """Names of the model's points; of both kinds of layer, where its configuration does not say which it has (its recorder says what is wrong with it)."""
    from tio_megatron.checkpoint import CheckpointConfig
    from tio_megatron.models import moe_layers, points

    try:
        shape = CheckpointConfig.from_file(model / "config.json").shape
    except ValueError:
        return {point.name for moe in (True, False) for point in points(1, [moe])}
    return {point.name for point in points(shape.layers, moe_layers(shape), architecture=shape.architecture)}


def require_tokens(sequences: Sequence[Sequence[int]], model: Path) -> None:
    """Refuse ids that the model does not have before anything is loaded; a folder without a ``vocab_size`` is left to the engine.

    Raises:
        ValueError: names the first such id and its place.
    """
    try:
        vocab = json.loads((model / "config.json").read_bytes()).get("vocab_size")
    except (OSError, ValueError, RecursionError, AttributeError):
        return
    for number, sequence in enumerate(sequences):
        for at, token in enumerate(sequence):
            if isinstance(vocab, int) and not 0 <= token < vocab:
                raise ValueError(f"sequence {number}, position {at}: token {token} is outside the vocabulary of {vocab} of {model}")


def record(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face checkpoint.")],
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Folder to make.")],
    tokens: Annotated[Path, typer.Option(help='JSON lines with token ids: {"tokens": [...]}, a list, or a recording that tio logdiff reads.')],
    engine: Annotated[Engine, typer.Option(help="Who runs the model.")] = Engine.hf,
    dtype: Annotated[str, typer.Option(help="Type of the weights: bfloat16, float32; the checkpoint's by default.")] = "",
    temperature: Annotated[float, typer.Option(min=1e-3, help="Divides the logits.")] = 1.0,
    full_vocab: Annotated[bool, typer.Option("--full-vocab", help="Record the whole row of log-probabilities of every token too.")] = False,
    keep: Annotated[list[str] | None, typer.Option(help="Keep the tensors of this point or parameter (again for more; 'all').")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in one pass (hf).")] = 1,
    layout: Annotated[str | None, typer.Option(help="megatron: tp2+ep2+etp1+pp2+cp2+allgather; vllm: tp2+ep. One rank by default.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks, in place of --layout.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert-parallel ranks, in place of --layout (vllm: as many as tp).")] = None,
    sp: Annotated[bool, typer.Option("--sp", help="Sequence parallelism, in place of --layout (megatron).")] = False,
    stock: Annotated[bool, typer.Option("--stock", help="The engine as it is, without the contract (megatron, vllm).")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Sequences to take from the file.")] = 16,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Run a model over given tokens with the tracer on, for tio diagnose.

    A trace holds a digest of every point of every layer for every token, and with --keep the tensors, which the diagnosis needs to say why. Megatron on
    several ranks: torchrun --nproc-per-node 2 -m tio_megatron record MODEL TRACE --engine megatron --layout tp2+ep2 --tokens FILE. vLLM starts its
    own ranks.
    Exit status: 0 recorded, 2 could not.
    """

    def work() -> tuple[int, dict[str, Any], Callable[[Console], None]]:
        from tio_megatron.verify.readers import read_tokens

        require_fit(engine, dtype=dtype, batch=batch, layout=layout, tp=tp, ep=ep, sp=sp, stock=stock, temperature=temperature)
        sequences = read_tokens(tokens)[:limit]
        if (trace / "trace.json").exists():
            raise ValueError(f"{trace}: there is a trace already; remove it or name another folder")
        if not model.is_dir():
            raise ValueError(f"{model}: no such folder; MODEL is the folder of a Hugging Face checkpoint")
        require_known(keep or [], model)
        require_tokens(sequences, model)
        options: dict[str, Any] = {"temperature": temperature, "full_vocab": full_vocab, "keep": keep or False}
        if engine is Engine.hf:
            from tio_megatron.integrations.transformers_models.recorder import load_hf, record_hf

            record_hf(load_hf(model, dtype), sequences, trace, batch=batch, **options)
        elif engine is Engine.megatron:
            from tio_megatron.integrations.megatron.recording.run import run_megatron

            words = layout or f"tp{tp or 1}+ep{ep or 1}+{'sp' if sp else 'nosp'}"
            run_megatron(model, sequences, trace, layout=words, stock=stock, **options)
        else:
            from tio_megatron.integrations.vllm.recording.recorder import run_vllm

            words = layout or f"tp{tp or 1}" + ("+ep" if (ep or 1) > 1 else "")
            run_vllm(model, sequences, trace, layout=words, dtype=dtype, stock=stock, **options)
        count = sum(map(len, sequences))
        said = f"recorded: {count} tokens of {len(sequences)} sequences, {trace}"
        return 0, {"tokens": count, "sequences": len(sequences), "trace": str(trace)}, lambda console: console.print(said, soft_wrap=True)

    tell("record", as_json, work, first=engine is not Engine.megatron or os.environ.get("RANK", "0") == "0")  # torchrun starts Megatron's ranks alone

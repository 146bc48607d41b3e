"""``tio record MODEL TRACE``."""

from __future__ import annotations

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

EPILOG = "Example: tio record Qwen3-30B-A3B hf.trace --engine hf --tokens rollout.jsonl --keep all"


class Engine(StrEnum):
    """Who runs the model."""

    hf = "hf"
    megatron = "megatron"
    vllm = "vllm"


def require_known(keep: Sequence[str], model: Path) -> None:
    """Refuse a word of ``--keep`` that no point and no parameter of the model has in its name: after a long run it would have kept nothing.

    Raises:
        ValueError: names the word and some that would work.
    """
    from tio_megatron.verify.readers.safe_file import SafeFile
    from tio_megatron.verify.recorders.scored import keeper
    from tio_megatron.verify.traces.points import points

    names = {point.name for moe in (True, False) for point in points(1, [moe])}
    for file in sorted(model.glob("*.safetensors")):
        with SafeFile(file) as held:
            names |= set(held.entries)
    plain = re.compile(r"layers\.\d+")
    names = {plain.sub("layers.0", name) for name in names}
    for word in keep:
        if word != "all" and not any(map(keeper([plain.sub("layers.0", word)]), names)):
            raise ValueError(f"--keep {word}: no point and no parameter has this in its name; attn, expert_out, logits, layers.0.o_proj or all would work")


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
    layout: Annotated[str, typer.Option(help="megatron: tp2+ep2+etp1+pp2+cp2+allgather; vllm: tp2+ep.")] = "tp1",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks, in place of --layout.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks, in place of --layout (vllm: as many as tp).")] = 1,
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

        sequences = read_tokens(tokens)[:limit]
        if (trace / "trace.json").exists():
            raise ValueError(f"{trace}: there is a trace already; remove it or name another folder")
        if not model.is_dir():
            raise ValueError(f"{model}: no such folder; MODEL is the folder of a Hugging Face checkpoint")
        require_known(keep or [], model)
        require_tokens(sequences, model)
        options: dict[str, Any] = {"temperature": temperature, "full_vocab": full_vocab, "keep": keep or False}
        if engine is Engine.hf:
            from tio_megatron.verify.recorders.hf import load_hf, record_hf

            record_hf(load_hf(model, dtype), sequences, trace, batch=batch, **options)
        elif engine is Engine.megatron:
            from tio_megatron.verify.recorders.megatron_run import run_megatron

            words = layout if layout != "tp1" else f"tp{tp}+ep{ep}+{'sp' if sp and tp > 1 else 'nosp'}"
            run_megatron(model, sequences, trace, layout=words, stock=stock, **options)
        else:
            from tio_megatron.verify.recorders.vllm import run_vllm

            words = layout if layout != "tp1" else f"tp{tp}" + ("+ep" if ep > 1 else "")
            run_vllm(model, sequences, trace, layout=words, dtype=dtype, stock=stock, **options)
        count = sum(map(len, sequences))
        said = f"recorded: {count} tokens of {len(sequences)} sequences, {trace}"
        first = os.environ.get("RANK", "0") == "0"  # of torchrun's ranks one speaks
        return 0, {"tokens": count, "sequences": len(sequences), "trace": str(trace)}, lambda console: console.print(said, soft_wrap=True) if first else None

    tell("record", as_json, work)

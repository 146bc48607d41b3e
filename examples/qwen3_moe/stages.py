"""The checkpoint a run starts from, its prompts, and the checks that come before any engine is started."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.qwen3_moe import corpus, makers, prompts
from examples.qwen3_moe.children import InputProblem
from examples.qwen3_moe.options import Options
from tio_megatron.checkpoint import Checkpoint, CheckpointConfig, tensor_table
from tio_megatron.contract import Contract

PRETRAIN = {"length": 128, "sequences": 8, "lr": 3e-3}


@dataclass(frozen=True)
class Stage:
    """One checkpoint and what is done with it.

    ``folder`` is where the checkpoint is, or will be when ``pretrain_from`` (random weights) is given; ``longest`` bounds a sequence.
    """

    name: str
    folder: Path
    config: CheckpointConfig
    prompts: tuple[tuple[int, ...], ...]
    rounds: int
    train: bool
    longest: int
    pretrain_from: Path | None = None
    stream: Any = None


def contract_for(options: Options) -> Contract:
    """The smallest cuts that serve every layout of the table."""
    return Contract.for_layouts(*[trainer.layout for trainer in options.trainers], *[rollout.layout for rollout in options.rollouts])


def check(options: Options, contract: Contract, config: CheckpointConfig) -> None:
    """Every layout must fit the model and the contract.

    Raises:
        ValueError: lists what does not fit and what would work.
    """
    for kind, layouts in (("trainer", [t.layout for t in options.trainers]), ("rollout", [r.layout for r in options.rollouts])):
        for layout in layouts:
            # A dense model has no expert groups; whatever the table says about them does not apply.
            fitted = layout if config.shape.experts else replace(layout, ep=1, etp=layout.tp)
            found = [str(problem) for problem in contract.problems(fitted, config.shape)]
            if found:
                raise ValueError(f"{kind}: layout {fitted} does not fit the contract: {'; '.join(found)}")


def refuse_misfits(options: Options) -> None:
    """What can be said of layouts and checkpoint before any rank is started; makes nothing.

    Raises:
        ValueError: bad input, in one line.
    """
    if options.model is not None:
        with Checkpoint(options.model) as checkpoint:
            config = checkpoint.config
    elif options.checkpoint == "tiny":
        config = CheckpointConfig.from_dict(makers.tiny_config(options.num_layers, options.dtype))
    else:
        config = CheckpointConfig.from_dict(makers.slice_config(options.num_layers, options.dtype))
    check(options, contract_for(options), config)


def prepare(options: Options, contract: Contract) -> list[Stage]:
    """Make or open the checkpoints (on one rank). Pre-training is left to the trainer.

    Raises:
        ValueError: bad input, in one line.
    """
    if options.model is not None:
        return [_own(options, contract)]
    texts = corpus.corpus()
    if options.checkpoint == "tiny":
        return [_tiny(options, contract, texts)]
    full = makers.slice_config(options.num_layers, options.dtype)
    small = makers.slice_config(options.num_layers, options.dtype, experts=32, vocab=32768)
    return [
        _slice(options, contract, full, texts, name="slice", rounds=1, train=False),
        _slice(options, contract, small, texts, name="slice for training", rounds=options.rounds, train=options.train),
    ]


def _tiny(options: Options, contract: Contract, texts: Sequence[str]) -> Stage:
    raw = makers.tiny_config(options.num_layers, options.dtype)
    config = CheckpointConfig.from_dict(raw)
    check(options, contract, config)
    key = makers.config_key(raw, corpus.corpus_key(texts), options.seed, options.pretrain_steps, PRETRAIN, contract.fingerprint())
    folder = options.cache / f"tiny-{key}"
    tokenizer = corpus.train_tokenizer(texts, config.shape.vocab)
    stream = corpus.encode(tokenizer, texts)
    asked, longest = _prompts(options, config, tokenizer, stream)
    start = None
    if not (folder / "config.json").is_file():
        start = options.cache / f"tiny-random-{makers.config_key(raw, corpus.corpus_key(texts), options.seed)}"
        if not (start / "config.json").is_file():
            require_room(options.cache, 4 * bytes_of(config))
            files = corpus.save_tokenizer(tokenizer, options.cache / f".tokenizer-{key}")
            makers.make_random(start, raw, options.seed, tuple(files))
            shutil.rmtree(options.cache / f".tokenizer-{key}", ignore_errors=True)
    return Stage("tiny", folder, config, asked, options.rounds, options.train, longest, start, stream if start else None)


def _slice(options: Options, contract: Contract, raw: dict[str, Any], texts: Sequence[str], *, name: str, rounds: int, train: bool) -> Stage:
    config = CheckpointConfig.from_dict(raw)
    check(options, contract, config)
    stream = np.random.default_rng(options.seed).integers(0, config.shape.vocab, 10_000, dtype=np.int32)
    asked, longest = _prompts(options, config, None, stream, prompts.QUICK)
    folder = options.cache / f"slice-{makers.config_key(raw, options.seed)}"
    if not (folder / "config.json").is_file():
        require_room(options.cache, 2 * bytes_of(config))
        makers.make_random(folder, raw, options.seed)
    return Stage(name, folder, config, asked, rounds, train, longest)


def _own(options: Options, contract: Contract) -> Stage:
    assert options.model is not None
    with Checkpoint(options.model) as checkpoint:
        config = checkpoint.config
    check(options, contract, config)
    tokenizer = None
    if (options.model / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        path = options.model / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: no tokenizer ({error}); take the model's own file, or none and give prompts as tokens") from error
        texts = corpus.corpus()[:20]
        stream = corpus.encode(tokenizer, texts) if tokenizer.token_to_id(corpus.END) is not None else np.array(tokenizer.encode("".join(texts)).ids, np.int32)
        stream = stream[stream < config.shape.vocab]
    else:
        stream = np.random.default_rng(options.seed).integers(0, config.shape.vocab, 10_000, dtype=np.int32)
    asked, longest = _prompts(options, config, tokenizer, stream)
    return Stage(str(options.model), options.model, config, asked, options.rounds, options.train, longest)


def _prompts(
    options: Options, config: CheckpointConfig, tokenizer: Any, stream: Any, lengths: Sequence[int] = prompts.LENGTHS
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The prompts and the longest sequence they make."""
    if options.prompts is not None:
        asked, where = prompts.from_file(options.prompts, tokenizer), str(options.prompts)
    else:
        room = config.max_positions - options.max_new_tokens
        fitting = [length for length in (prompts.QUICK if options.quick else lengths) if length <= room]
        if not fitting:
            raise ValueError(f"--max-new-tokens {options.max_new_tokens}: at most {config.max_positions - 1} fit, prompt and all make {config.max_positions}")
        asked, where = prompts.from_stream(stream, fitting, options.seed), "prompts"
    prompts.check(asked, vocab=config.shape.vocab, longest=config.max_positions, max_new_tokens=options.max_new_tokens, where=where)
    longest = max(len(prompt) for prompt in asked) + options.max_new_tokens
    # A multiple of a page and of every tensor-parallel size.
    return tuple(tuple(prompt) for prompt in asked), min(config.max_positions, -(-longest // 64) * 64)


def bytes_of(config: CheckpointConfig) -> int:
    """Bytes of all tensors."""
    return sum(spec.numel for spec in tensor_table(config.shape).values()) * (2 if config.dtype == "bfloat16" else 4)


def require_room(folder: Path, need: int, option: str = "TIO_CACHE") -> None:
    """Refuse before anything is written when the disk is too small."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise InputProblem(f"{folder}: {need / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free; set {option} to a folder on a larger disk")

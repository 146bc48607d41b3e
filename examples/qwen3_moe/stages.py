"""The checkpoint a run starts from, its prompts, and the checks that come before any engine is started."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.qwen3_moe import corpus, makers, prompts
from examples.qwen3_moe.options import Options
from tio_megatron.checkpoint import Checkpoint, CheckpointConfig, tensor_table
from tio_megatron.contract import Contract
from tio_megatron.contract.environment import VARIABLE, from_environment
from tio_megatron.jobs.folders import forget_old, require_room
from tio_megatron.kernels.attention import MAX_HEAD

PRETRAIN = {"length": 128, "sequences": 8, "lr": 3e-3}
MADE = re.compile(r"(tiny|tiny-random|slice)-[0-9a-f]{12}")


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
    """The one that ``TIO_CONTRACT`` names, else the smallest cuts that serve every layout of the table.

    Raises:
        ValueError: ``TIO_CONTRACT`` names nothing that can be read.
    """
    named = from_environment()
    if named is not None:
        return named.contract
    return Contract.for_layouts(*[trainer.layout for trainer in options.trainers], *[rollout.layout for rollout in options.rollouts])


def check(options: Options, contract: Contract, config: CheckpointConfig) -> None:
    """The kernels and Megatron must take the model, and every layout must fit the model and the contract.

    Raises:
        ValueError: lists what does not fit and what would work.
    """
    named = from_environment()
    if named is not None and named.vocab_size not in (None, config.shape.vocab):
        raise ValueError(f"{VARIABLE}: vocab_size is {named.vocab_size}, the checkpoint's is {config.shape.vocab}; leave it out to take that")
    if config.shape.head_dim % 16 or config.shape.head_dim > MAX_HEAD:
        raise ValueError(f"config.json: head_dim is {config.shape.head_dim}, the attention kernel takes a multiple of 16 up to {MAX_HEAD}")
    if config.shape.experts and config.shape.top_k == 1 and config.normalise:
        raise ValueError(
            "config.json: num_experts_per_tok is 1 with norm_topk_prob true, which makes every probability 1, and Megatron refuses it;"
            " more experts per token, or norm_topk_prob false, would work"
        )
    whose = "the contract" if named is None else f"the contract that {VARIABLE} names (unset it, and the job chooses one that fits the layouts)"
    for kind, layouts in (("trainer", [t.layout for t in options.trainers]), ("rollout", [r.layout for r in options.rollouts])):
        for layout in layouts:
            # A dense model has no expert groups; whatever the table says about them does not apply.
            fitted = layout if config.shape.experts else replace(layout, ep=1, etp=layout.tp)
            found = [str(problem) for problem in contract.problems(fitted, config.shape)]
            if found:
                raise ValueError(f"{kind}: layout {fitted} does not fit {whose}: {'; '.join(found)}")


def for_model(options: Options, config: CheckpointConfig) -> Options:
    """The options for this model: vLLM takes expert parallelism with experts alone, so without them rollout layouts that become the same are one."""
    if config.shape.experts:
        return options
    return replace(options, rollouts=tuple(dict.fromkeys(replace(rollout, expert_parallel=False) for rollout in options.rollouts)))


def configs(options: Options) -> list[CheckpointConfig]:
    """The configuration of each stage; a checkpoint of one's own is opened and its tensors are looked through.

    Raises:
        ValueError: the checkpoint is not whole, or not covered.
    """
    if options.model is not None:
        with Checkpoint(options.model) as checkpoint:
            return [checkpoint.config]
    return [CheckpointConfig.from_dict(raw) for raw in _raw(options)]


def _raw(options: Options) -> list[dict[str, Any]]:
    if options.checkpoint == "tiny":
        return [makers.tiny_config(options.num_layers, options.dtype)]
    full = makers.slice_config(options.num_layers, options.dtype)
    return [full, makers.slice_config(options.num_layers, options.dtype, experts=32, vocab=32768)]


def check_all(options: Options) -> None:
    """Refuse what a stage would meet later: a model, a layout or a prompt that does not fit, a disk that is too small. Makes nothing.

    Raises:
        ValueError: bad input, in one line.
    """
    contract, raws = contract_for(options), [] if options.model is not None else _raw(options)
    found = configs(options)
    for config in found:
        check(options, contract, config)
        tokenizer = tokenizer_for(options, config) if options.model is not None or options.prompts is not None else None
        _prompts(options, config, tokenizer, None)
    wanted = [_tiny_folder(options, contract, raws[0])] if options.checkpoint == "tiny" and raws else [_slice_folder(options, raw) for raw in raws]
    missing = [config for folder, config in zip(wanted, found, strict=False) if not (folder / "config.json").is_file()]
    require_room(options.cache, sum(4 * bytes_of(config) for config in missing), "TIO_CACHE")


def tokenizer_for(options: Options, config: CheckpointConfig) -> Any:
    """The checkpoint's tokenizer: read, or made for ``tiny``; None when it has none.

    Raises:
        ValueError: it cannot be read.
    """
    if options.model is None:
        return corpus.train_tokenizer(corpus.corpus(), config.shape.vocab) if options.checkpoint == "tiny" else None
    path = options.model / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: no tokenizer ({error}); take the model's own file, or none and give prompts as tokens") from error


def prepare(options: Options, contract: Contract) -> list[Stage]:
    """Make or open the checkpoints (on one rank). Pre-training is left to the trainer.

    Raises:
        ValueError: bad input, in one line.
    """
    if options.model is not None:
        return [_own(options, contract)]
    raws = _raw(options)
    if options.checkpoint == "tiny":
        return [_tiny(options, contract, raws[0], corpus.corpus())]
    full, small = raws
    return [
        _slice(options, contract, full, name="slice", rounds=1, train=False),
        _slice(options, contract, small, name="slice for training", rounds=options.rounds, train=options.train),
    ]


def _tiny_folder(options: Options, contract: Contract, raw: dict[str, Any], texts: Sequence[str] | None = None) -> Path:
    """Named by everything that the pre-trained weights depend on."""
    key = corpus.corpus_key(texts if texts is not None else corpus.corpus())
    return options.cache / f"tiny-{makers.config_key(raw, key, options.seed, options.pretrain_steps, PRETRAIN, contract.fingerprint())}"


def _slice_folder(options: Options, raw: dict[str, Any]) -> Path:
    return options.cache / f"slice-{makers.config_key(raw, options.seed)}"


def _tiny(options: Options, contract: Contract, raw: dict[str, Any], texts: Sequence[str]) -> Stage:
    config = CheckpointConfig.from_dict(raw)
    check(options, contract, config)
    folder = _tiny_folder(options, contract, raw, texts)
    tokenizer = corpus.train_tokenizer(texts, config.shape.vocab)
    stream = corpus.encode(tokenizer, texts)
    asked, longest = _prompts(options, config, tokenizer, stream)
    start = None
    if not (folder / "config.json").is_file():
        start = options.cache / f"tiny-random-{makers.config_key(raw, corpus.corpus_key(texts), options.seed)}"
        if not (start / "config.json").is_file():
            options.cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=options.cache) as draft:
                makers.make_random(start, raw, options.seed, tuple(corpus.save_tokenizer(tokenizer, Path(draft))))
    forget_old(options.cache, MADE, folder)
    return Stage("tiny", folder, config, asked, options.rounds, options.train, longest, start, stream if start else None)


def _slice(options: Options, contract: Contract, raw: dict[str, Any], *, name: str, rounds: int, train: bool) -> Stage:
    config = CheckpointConfig.from_dict(raw)
    check(options, contract, config)
    stream = np.random.default_rng(options.seed).integers(0, config.shape.vocab, 10_000, dtype=np.int32)
    asked, longest = _prompts(options, config, None, stream, prompts.QUICK)
    folder = _slice_folder(options, raw)
    makers.make_random(folder, raw, options.seed)
    return Stage(name, folder, config, asked, rounds, train, longest)


def _own(options: Options, contract: Contract) -> Stage:
    assert options.model is not None
    with Checkpoint(options.model) as checkpoint:
        config = checkpoint.config
    check(options, contract, config)
    tokenizer = tokenizer_for(options, config)
    if tokenizer is not None:
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
    """The prompts and the longest sequence they make; without a ``stream`` to cut them from they are only looked at."""
    if options.prompts is not None:
        asked, where = prompts.encode(options.prompts, prompts.read(options.prompts), tokenizer), str(options.prompts)
    else:
        fitting = prompts.default_lengths(options.quick, config.max_positions, options.max_new_tokens, lengths)
        if stream is None:
            return (), 0
        asked, where = prompts.from_stream(stream, fitting, options.seed), "prompts"
    prompts.check(asked, vocab=config.shape.vocab, longest=config.max_positions, max_new_tokens=options.max_new_tokens, where=where)
    longest = max(len(prompt) for prompt in asked) + options.max_new_tokens
    # A multiple of a page and of every tensor-parallel size.
    return tuple(tuple(prompt) for prompt in asked), min(config.max_positions, -(-longest // 64) * 64)


def bytes_of(config: CheckpointConfig) -> int:
    """Bytes of all tensors."""
    return sum(spec.numel for spec in tensor_table(config.shape).values()) * (2 if config.dtype == "bfloat16" else 4)


def bytes_on_the_way(found: Sequence[Stage]) -> int:
    """Bytes of the weights that a run keeps between its engines."""
    return max(bytes_of(stage.config) * (stage.rounds if stage.train else 0) for stage in found)

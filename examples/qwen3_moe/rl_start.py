"""The checkpoint that reinforcement learning starts from: pre-trained on text, then shown its task with the answers for a few steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.qwen3_moe import corpus, makers, tasks
from examples.qwen3_moe.job import pretrain_stage
from examples.qwen3_moe.report import Screen
from examples.qwen3_moe.rl import RlOptions
from examples.qwen3_moe.stages import Stage
from examples.qwen3_moe.trainer import Trainer
from tio_megatron.checkpoint import Checkpoint, manifest_digest
from tio_megatron.contract import Contract
from tio_megatron.jobs.problems import InputProblem
from tio_megatron.jobs.ranks import Ranks

WARM = {"sequences": 32, "lr": 1e-3}


class Words:
    """A checkpoint's tokenizer, and the token that ends a response.

    Raises:
        InputProblem: the folder has no tokenizer, one that cannot be read, or no end token.
    """

    def __init__(self, folder: Path, configured_end: Any) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputProblem(f"{folder}: no tokenizer.json; tasks are texts, so the checkpoint's tokenizer must lie in its folder")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise InputProblem(f"{path}: no tokenizer ({error}); take the model's own file") from error
        configured = configured_end[0] if isinstance(configured_end, list) and configured_end else configured_end
        found = [end for end in (self.tokenizer.token_to_id(corpus.END), self.tokenizer.token_to_id("<|im_end|>"), configured) if isinstance(end, int)]
        if not found:
            raise InputProblem(f"{folder}: neither the tokenizer nor config.json names an end token (eos_token_id)")
        self.end: int = found[0]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, up to its end."""
        return str(self.tokenizer.decode([token for token in tokens if token != self.end]))


def starting_point(options: RlOptions, stage: Stage, contract: Contract, ranks: Ranks, screen: Screen) -> tuple[Path, Words]:
    """The folder of the checkpoint to start from, made if need be, and its tokenizer; every rank. The stock run starts from the same one."""
    job, end = options.job, stage.config.raw.get("eos_token_id")
    words = Words(stage.pretrain_from or stage.folder, end)
    if stage.pretrain_from is not None:
        with _trainer(options, stage, contract) as trainer:
            pretrain_stage(trainer, job, stage, screen)
    if options.warm_steps == 0:
        return stage.folder, words

    def named() -> tuple[Path, bool]:
        with Checkpoint(stage.folder) as checkpoint:
            base = manifest_digest(checkpoint.digests())
        key = makers.config_key(stage.config.raw, base, options.task, options.warm_steps, job.seed, WARM, contract.fingerprint())
        folder = job.cache / f"rl-{options.task}-{key}"
        return folder, (folder / "config.json").is_file()

    folder, there = ranks.from_first(named)
    if not there:
        with _trainer(options, stage, contract) as trainer:
            trainer.load(stage.folder)
            _warm_up(trainer, options, words, screen)
            trainer.export(folder, files=tokenizer_files(stage.folder))
    return folder, words


def tokenizer_files(folder: Path) -> list[Path]:
    """What of a checkpoint's folder belongs to its tokenizer."""
    return [file for file in (folder / "tokenizer.json", folder / "tokenizer_config.json") if file.is_file()]


def _warm_up(trainer: Trainer, options: RlOptions, words: Words, screen: Screen) -> None:
    """Next-token training on the answers, each with its end."""
    count, lr = int(WARM["sequences"]), float(WARM["lr"])
    examples = tasks.make(options.task, options.job.seed, tasks.WARM_UP, count * options.warm_steps)
    trainer.train_with(lr=lr, clip_grad=options.job.clip_grad)
    with screen.bar(f"showing it the task '{options.task}', {options.trainer}", options.warm_steps) as advance:
        for number in range(options.warm_steps):
            shown = [(words.encode(task.prompt), [*words.encode(task.answer), words.end]) for task in examples[number * count : (number + 1) * count]]
            each = 1.0 / sum(len(answer) for _, answer in shown)
            weights = [[0.0] * (len(prompt) - 1) + [each] * len(answer) for prompt, answer in shown]
            found = trainer.step([[*prompt, *answer] for prompt, answer in shown], weights, size=count // trainer.dp, lr=lr * min(1.0, (number + 1) / 10))
            advance(number + 1, f"loss {found['loss']:.2f}")


@contextlib.contextmanager
def _trainer(options: RlOptions, stage: Stage, contract: Contract) -> Iterator[Trainer]:
    trainer = Trainer(stage.config, options.trainer, contract, longest=stage.longest, seed=options.job.seed)
    yield trainer
    trainer.close()

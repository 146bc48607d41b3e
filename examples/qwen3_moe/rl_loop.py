"""The steps of a run of reinforcement learning: push the weights, sample, grade, score, compare, learn."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import torch

from examples.qwen3_moe import tasks
from examples.qwen3_moe.grpo import Learned, PolicyTrainer, Samples
from examples.qwen3_moe.report import Screen
from examples.qwen3_moe.rl import RlOptions
from examples.qwen3_moe.rl_metrics import Metrics, MetricsFile, measure, read
from examples.qwen3_moe.rl_start import Words, tokenizer_files
from tio_megatron import kernels, rl
from tio_megatron.checkpoint import Checkpoint, manifest_digest
from tio_megatron.checkpoint.training import LATEST
from tio_megatron.contract import Contract
from tio_megatron.contract.words import RolloutLayout
from tio_megatron.integrations.megatron.resume.train_state import load_training, save_training
from tio_megatron.integrations.vllm.rollout import Request, Rollout
from tio_megatron.jobs.problems import InputProblem
from tio_megatron.jobs.ranks import Ranks
from tio_megatron.rollouts import About, Batch, Store

CHECKPOINTS = "checkpoints"
ROLLOUTS = "rollouts"
PAGE = 64
MOST_AT_ONCE = 256
"""Requests that the engine decodes together."""


class Loop:
    """One run on every rank; the engine, the grades and the files live on rank 0.

    Args:
        options: of the run.
        ranks: the trainer's ranks.
        screen: the terminal.
        words: the tokenizer.
        start: folder of the checkpoint to start from.
        scratch: folder for weights on their way.
        contract: of both sides, or None: both are stock.
    """

    def __init__(self, options: RlOptions, ranks: Ranks, screen: Screen, words: Words, start: Path, scratch: Path, contract: Contract | None) -> None:
        self.options, self.ranks, self.screen, self.words = options, ranks, screen, words
        self.start, self.scratch, self.contract = start, scratch, contract
        with Checkpoint(start) as checkpoint:
            self.config = checkpoint.config
        self.rollout = options.rollout if self.config.shape.experts else RolloutLayout(options.rollout.tp)
        self.longest = ranks.from_first(self._longest)

    def run(self) -> list[Metrics]:
        """All steps; their numbers on rank 0, nothing elsewhere."""
        options, ranks = self.options, self.ranks
        trainer = PolicyTrainer(self.config, options.trainer, self.contract, longest=self.longest, seed=options.job.seed)
        trainer.temperature = options.job.temperature
        trainer.load(self.start)
        trainer.train_with(lr=options.job.lr, clip_grad=options.job.clip_grad)
        again = ranks.from_first(self._again)
        first = self._resume(trainer) if options.resume or (again and ranks.from_first(self._has_checkpoint)) else 0
        done: list[Metrics] = ranks.from_first(lambda: self._done_before(first)) if first else []
        if again:
            self.screen.say(f"torchrun has started the ranks again: on from step {first}")
        if first >= options.steps:
            if again:  # lost after its last step
                return done
            raise InputProblem(f"--steps {options.steps}: the newest checkpoint below {options.job.out} has {first}; ask for more, or leave out --resume")
        with ranks.on_first(self._start_engine) or contextlib.nullcontext() as engine:
            file = ranks.on_first(lambda: MetricsFile(options.job.out, done))
            kept = ranks.on_first(lambda: self._open_rollouts(again)) if options.keep_rollouts else None
            ranks.on_first(ranks.begin)
            name = f"{'stock ' if options.stock else ''}GRPO on '{options.task}', Megatron {options.trainer}, vLLM {self.rollout}"
            with self.screen.bar(name, options.steps) as advance:
                for number in range(first, options.steps):
                    found = self._step(trainer, engine, number, kept)

                    def keep(found: Metrics = found, number: int = number) -> None:
                        assert file is not None
                        file.add(found)
                        done.append(found)
                        advance(number + 1, f"reward {found['reward']:.3f}, max |logdiff| {found['logdiff_max']:g}, {found['tokens_per_s']:.0f} tokens/s")

                    ranks.on_first(keep)
                    if options.save_every and (number + 1) % options.save_every == 0:
                        self._save(trainer, number + 1)
        trainer.close()
        return done

    def _save(self, trainer: PolicyTrainer, step: int) -> None:
        """A checkpoint after ``step`` steps; every rank."""
        save_training(
            self.options.job.out / CHECKPOINTS,
            trainer.model,
            trainer.optimizer,
            None,
            self.config,
            step=step,
            settings=self.options.settings,
            files=tokenizer_files(self.start),
        )

    def _resume(self, trainer: PolicyTrainer) -> int:
        """Take over the newest checkpoint; returns how many steps it has. Every rank.

        Raises:
            CheckpointError: there is none, or it is of another run.
        """
        folder = self.options.job.out / CHECKPOINTS
        return load_training(folder, trainer.model, trainer.optimizer, None, self.config, settings=self.options.settings).step

    def _done_before(self, count: int) -> list[Metrics]:
        """The steps of the checkpoint, as they were written down (rank 0).

        Raises:
            InputProblem: lines are missing.
        """
        path = self.options.job.out / "metrics.jsonl"
        try:
            found = read(path)[:count]
        except ValueError as error:
            raise InputProblem(str(error)) from error
        if [step.get("step") for step in found] != list(range(1, count + 1)):
            raise InputProblem(f"{path}: the checkpoint beside it has {count} steps, the file has not all of them; start the run anew without --resume")
        return found

    def _open_rollouts(self, again: bool) -> KeptRollouts:
        """The store below ``--out`` (rank 0): of this run alone, unless it goes on from a checkpoint or was started again."""
        resume = self.options.resume or again
        return KeptRollouts(self.options.job.out / ROLLOUTS, self.contract, self.options.job.temperature, f"vllm {self.rollout}", resume)

    def _again(self) -> bool:
        """Whether torchrun has started the ranks again after this run had begun (rank 0).

        Raises:
            InputProblem: checkpoints would be written beside those of another run, and a restart could not tell them apart.
        """
        again = self.ranks.begun
        if self.options.save_every and not self.options.resume and not again and self._has_checkpoint():
            folder = self.options.job.out / CHECKPOINTS
            raise InputProblem(f"{folder}: holds checkpoints of another run; go on from them with --resume, move them away, or name another --out")
        return again

    def _has_checkpoint(self) -> bool:
        return (self.options.job.out / CHECKPOINTS / LATEST).is_file()

    def _step(self, trainer: PolicyTrainer, engine: Rollout | None, number: int, kept: KeptRollouts | None) -> Metrics:
        options, began = self.options, time.monotonic()
        weights = self.scratch / f"weights-{number}"
        digests = trainer.export(weights)

        def sample() -> Samples:
            assert engine is not None
            engine.update(weights, digests)
            shutil.rmtree(weights)
            found = self._sample(engine, number)
            if kept is not None:
                kept.add(found, step=number + 1, weights=manifest_digest(digests))
            return found

        samples = self.ranks.from_first(sample)
        size = options.job.micro_batch_size
        scores, entropies = trainer.score_policy(samples, size=size)
        advantages = rl.group_advantages(torch.tensor(samples.rewards), torch.tensor(samples.groups))
        learned: list[Learned] = []
        share = len(samples.sequences) // options.minibatches
        for lo in range(0, len(samples.sequences), share):
            part = samples.part(lo, lo + share)
            learned.append(trainer.learn(part, advantages[lo : lo + share], size=size, clip=options.clip, clip_high=options.clip_high))
        if not self.ranks.first:
            return {}
        first = learned[0]
        found = measure(samples.logprobs, scores, entropies, first.ratios, samples.rewards)
        return {
            "step": number + 1,
            **found,
            "tokens_per_s": found["tokens"] / (time.monotonic() - began),
            "solved": sum(reward == 1.0 for reward in samples.rewards) / len(samples.rewards),
            "grad_norm": first.grad_norm,
            "weights": manifest_digest(digests)[:16],
        }

    def _sample(self, engine: Rollout, number: int) -> Samples:
        """Every prompt of the step sampled several times, and graded (rank 0)."""
        options, words = self.options, self.words
        asked = tasks.make(options.task, options.job.seed, number, options.prompts)
        groups = [prompt for prompt in range(len(asked)) for _ in range(options.samples)]
        encoded = [words.encode(task.prompt) for task in asked]
        requests = [
            Request(
                tuple(encoded[prompt]),
                options.job.max_new_tokens,
                options.job.temperature,
                tasks.sampling_seed(options.job.seed, number, prompt, place % options.samples),
            )
            for place, prompt in enumerate(groups)
        ]
        sampled = engine.sample(requests, stop=words.end)
        return Samples(
            sequences=[[*request.tokens, *answer.tokens] for request, answer in zip(requests, sampled, strict=True)],
            prompts=[len(request.tokens) for request in requests],
            logprobs=[answer.logprobs for answer in sampled],
            rewards=[tasks.grade(asked[prompt], words.decode(answer.tokens)) for prompt, answer in zip(groups, sampled, strict=True)],
            groups=groups,
            seeds=[request.seed for request in requests],
        )

    def _start_engine(self) -> Rollout:
        options = self.options
        at_once = min(options.prompts * options.samples, MOST_AT_ONCE)
        with self.screen.step(f"starting {'stock ' if self.contract is None else ''}vLLM, {options.rollout}"):
            return Rollout(
                self.rollout,
                self.start,
                self.contract,
                longest=self.longest,
                log=options.job.out / "logs",
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from: after temperature
                max_num_seqs=at_once,
                # No prompt is cut: stock vLLM on the CPU ends when a cut one has a seed of its own.
                max_num_batched_tokens=at_once * self.longest,
            )

    def _longest(self) -> int:
        """Tokens of the longest sequence, in whole pages.

        Raises:
            InputProblem: the model takes fewer.
        """
        options = self.options
        asked = [task for number in range(options.steps) for task in tasks.make(options.task, options.job.seed, number, options.prompts)]
        longest = max(len(self.words.encode(task.prompt)) for task in asked) + options.job.max_new_tokens
        if longest > self.config.max_positions:
            asked_for = f"--max-new-tokens {options.job.max_new_tokens}: prompt and response make up to {longest} tokens"
            raise InputProblem(f"{asked_for}, the model takes {self.config.max_positions}")
        return min(self.config.max_positions, -(-longest // PAGE) * PAGE)


class KeptRollouts:
    """The store of one run: batch ``n`` is step ``n + 1``.

    Args:
        folder: of the store; made if it is not there.
        contract: of both sides, or None: both are stock.
        temperature: of the sampling.
        source: engine and layout in words.
        resume: the run goes on from a checkpoint, so steps may be there already.

    Raises:
        InputProblem: a store of another run is there.
    """

    def __init__(self, folder: Path, contract: Contract | None, temperature: float, source: str, resume: bool) -> None:
        self.contract, self.temperature, self.source = contract, temperature, source
        there = (folder / "store.json").is_file()
        self.store = Store.open(folder) if there else Store.create(folder)
        if self.store.batches and not resume:
            raise InputProblem(f"{folder}: holds the rollouts of another run; move them away, or name another --out")

    def add(self, samples: Samples, *, step: int, weights: str) -> None:
        """Keep a step. One that is there already, from before a restart, must have the same bytes.

        Raises:
            InputProblem: it has not, or steps before it are missing.
        """
        named = {} if self.contract is None else {"contract": self.contract.to_json()}
        family = "" if self.contract is None else kernels.version(self.contract.family)
        fingerprint = "" if self.contract is None else self.contract.fingerprint(family)
        about = About(fingerprint, family, weights, step, self.temperature, self.source, named)
        batch = Batch.of(about, samples.sequences, samples.prompts, samples.logprobs, seeds=samples.seeds, rewards=samples.rewards, groups=samples.groups)
        if step <= self.store.batches:
            differs = self.store.batch(step - 1).same(batch)
            if differs:
                raise InputProblem(f"{self.store.folder}: step {step} was sampled before with other {differs}; move the store away, or name another --out")
            return
        if step != self.store.batches + 1:
            raise InputProblem(f"{self.store.folder}: holds {self.store.batches} steps, this is step {step}; move the store away, or name another --out")
        self.store.append(batch)

"""One run: rounds of sampling, scoring, training and pushing weights; then every other layout on the same tokens; then the stock packages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from examples.qwen3_moe.options import Options
from examples.qwen3_moe.prompts import requests
from examples.qwen3_moe.report import Pair, Screen
from examples.qwen3_moe.stages import PRETRAIN, Stage, for_model
from examples.qwen3_moe.trainer import Trainer, pretrain
from tio_megatron.checkpoint import Checkpoint, manifest_digest
from tio_megatron.contract import Contract
from tio_megatron.contract.words import RolloutLayout, TrainerLayout
from tio_megatron.integrations.vllm.rollout import Request, Rollout
from tio_megatron.jobs.children import Child
from tio_megatron.jobs.ranks import Ranks
from tio_megatron.verify import Comparison, Recording, compare

STOCK_TRAINERS = ("tp1", "tp2+ep2")
STOCK_ROLLOUTS = ("tp1", "tp2")
CHILD_SECONDS = 1800.0
Asked = tuple[list[list[int]], list[int]]
"""Sequences and the lengths of their prompts."""


class Run:
    """State of one stage on every rank; recordings and children live on rank 0."""

    def __init__(self, options: Options, ranks: Ranks, screen: Screen, contract: Contract, stage: Stage, scratch: Path) -> None:
        self.options, self.ranks, self.screen, self.contract, self.stage = for_model(options, stage.config), ranks, screen, contract, stage
        self.scratch, self.log = scratch, options.out / "logs"
        self.weights: list[Path] = []
        self.recorded: dict[RolloutLayout, list[Recording]] = {}
        self.scored: dict[str, list[Recording]] = {}
        self.fingerprint = ""

    def pairs(self) -> list[Pair]:
        """Every trainer layout against every rollout layout, all rounds together (rank 0)."""
        made = []
        for trainer in self.options.trainers:
            for rollout in self.options.rollouts:
                rounds = zip(self.scored[str(trainer)], self.recorded[rollout], strict=True)
                made.append(
                    Pair(str(trainer), str(rollout), total(compare(scores.like(recording), recording) for scores, recording in rounds), self.stage.name)
                )
        return made

    def rounds(self) -> None:
        """The main trainer and the main rollout: sample, score, train, push; every rank."""
        options, ranks, stage = self.options, self.ranks, self.stage
        trainer = Trainer(stage.config, options.trainer, self.contract, longest=stage.longest, seed=options.seed)
        if stage.pretrain_from is not None:
            pretrain_stage(trainer, options, stage, self.screen)
        trainer.load(stage.folder)
        if stage.train:
            trainer.train_with(lr=options.lr, clip_grad=options.clip_grad)
        self.weights = [stage.folder]
        with ranks.on_first(lambda: self._start(options.rollouts[0])) or contextlib.nullcontext() as engine:
            for number in range(stage.rounds):
                sequences, prompts = ranks.from_first(lambda number=number: self._sample(engine, options.rollouts[0], number))
                self._score_main(trainer, number, sequences, prompts)
                if stage.train:
                    self._train(trainer, engine, number, sequences, prompts)
        self._further_rollouts()
        self._score_what_differs(trainer)
        trainer.close()

    def further_trainers(self) -> None:
        """Every other trainer layout scores the tokens of all rollouts with each round's weights (rank 0)."""
        further = [trainer for trainer in self.options.trainers if str(trainer) != str(self.options.trainer)]
        if not further:
            return
        parts = [self._union(number) for number in range(self.stage.rounds)]
        with Child("trainers", "examples.qwen3_moe.trainer_child", self.log, {"OMP_NUM_THREADS": "1"}) as child:
            for layout in further:
                self.scored[str(layout)] = self._ask_to_score(child, layout, self.contract, parts)

    def control(self) -> list[Pair]:
        """The stock packages with the first weights: greedy, tensor parallel only, as far as stock goes on a CPU (rank 0)."""
        stage = self.stage
        quick = self.options.quick
        greedy = [request for request in self._requests(0) if request.temperature == 0]
        recorded: dict[RolloutLayout, Recording] = {}
        for layout in [RolloutLayout.parse(text) for text in STOCK_ROLLOUTS[: 1 if quick else None]]:
            with self.screen.step(f"stock vLLM, {layout}") as note:
                with Rollout(layout, stage.folder, None, longest=stage.longest, log=self.log) as engine:
                    recorded[layout] = record(engine, greedy)
                note(f"{int(recorded[layout].sampled.sum())} tokens sampled")
        pairs = []
        with Child("stock trainers", "examples.qwen3_moe.trainer_child", self.log, {"OMP_NUM_THREADS": "1", "TIO_CONTRACT": None}) as child:
            for trainer in [TrainerLayout.parse(text) for text in STOCK_TRAINERS[: 1 if quick else None]]:
                union = _union(list(recorded.values()))
                scores = self._ask_to_score(child, trainer, None, [union])[0]
                pairs += [Pair(str(trainer), str(layout), compare(scores.like(found), found), stage.name) for layout, found in recorded.items()]
        return pairs

    def _start(self, layout: RolloutLayout) -> Rollout:
        with self.screen.step(f"starting vLLM, {layout}"):
            engine = Rollout(layout, self.stage.folder, self.contract, longest=self.stage.longest, log=self.log)
        self.fingerprint = engine.fingerprint
        return engine

    def _requests(self, number: int) -> list[Request]:
        options = self.options
        return requests(self.stage.prompts, max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=options.seed, round_number=number)

    def _sample(self, engine: Rollout, layout: RolloutLayout, number: int) -> Asked:
        with self.screen.step(f"round {number + 1}: vLLM samples, {layout}") as note:
            recording = record(engine, self._requests(number))
            note(f"{int(recording.sampled.sum())} tokens after {len(recording.lengths)} prompts")
        self.recorded.setdefault(layout, []).append(recording)
        return recording.sequences, recording.prompts.tolist()

    def _score_main(self, trainer: Trainer, number: int, sequences: list[list[int]], prompts: list[int]) -> None:
        options = self.options
        with self.screen.step(f"round {number + 1}: Megatron scores, {options.trainer}") as note:
            scores = trainer.score(sequences, prompts)
            if scores is not None:
                self.scored.setdefault(str(options.trainer), []).append(scores)
                found = compare(scores, self.recorded[options.rollouts[0]][number])
                numbers = f"max |logdiff| {found.max_abs:g}" if not found.nonfinite else f"{found.nonfinite} are not finite"
                note(f"{found.nonzero} of {found.tokens} log-probabilities differ, {numbers}, {found.rows_differing} of {found.rows} rows")

    def _train(self, trainer: Trainer, engine: Rollout | None, number: int, sequences: list[list[int]], prompts: list[int]) -> None:
        """One step on the round's own samples, and the new weights into the running engine."""
        options = self.options
        with self.screen.step(f"round {number + 1}: Megatron trains, {options.trainer}") as note:
            found = trainer.step(sequences, policy_weights(sequences, prompts), size=options.micro_batch_size)
            note(f"gradient norm {found['grad_norm']:.3g}")
        with self.screen.step(f"round {number + 1}: weights to vLLM") as note:
            folder = self.scratch / f"weights-{number + 1}"
            digests = trainer.export(folder)
            self.weights.append(folder)

            def push() -> None:
                assert engine is not None
                with Checkpoint(self.weights[number]) as before:
                    if manifest_digest(before.digests()) == manifest_digest(digests):
                        raise RuntimeError("the training step changed no weight")
                engine.update(folder, digests)

            self.ranks.on_first(push)
            note(f"{len(digests)} tensors, every digest verified in the engine")

    def _further_rollouts(self) -> None:
        """Every other rollout layout replays the rounds (rank 0 works, the others wait)."""

        def replay() -> None:
            for layout in self.options.rollouts[1:]:
                with self._start(layout) as engine:
                    for number in range(self.stage.rounds):
                        if number:
                            with Checkpoint(self.weights[number]) as checkpoint:
                                engine.update(self.weights[number], checkpoint.digests())
                        self._sample(engine, layout, number)

        self.ranks.on_first(replay)

    def _score_what_differs(self, trainer: Trainer) -> None:
        """The main trainer scores what other rollouts sampled and the main one did not: nothing, when the engines agree."""
        name = str(self.options.trainer)
        for number in range(self.stage.rounds):

            def missing(number: int = number) -> Asked:
                known = set(map(tuple, self.scored[name][number].sequences))
                sequences, prompts = self._union(number)
                kept = [(s, p) for s, p in zip(sequences, prompts, strict=True) if tuple(s) not in known]
                return [s for s, _ in kept], [p for _, p in kept]

            sequences, prompts = self.ranks.from_first(missing)
            if sequences:
                trainer.load(self.weights[number])
                scores = trainer.score(sequences, prompts)
                if scores is not None:
                    self.scored[name][number] += scores

    def _union(self, number: int) -> Asked:
        return _union([recordings[number] for recordings in self.recorded.values()])

    def _ask_to_score(
        self, child: Child, layout: TrainerLayout, contract: Contract | None, parts: Sequence[tuple[list[list[int]], list[int]]]
    ) -> list[Recording]:
        """One layout scores each part with that round's weights."""
        kind = "Megatron scores" if contract else "stock Megatron scores"
        self.scratch.mkdir(exist_ok=True)
        outs = [self.scratch / f"{'tio' if contract else 'stock'}-{str(layout).replace(' ', '-')}-{number}.npz" for number in range(len(parts))]
        rounds = [
            {"weights": str(self.weights[number]), "sequences": sequences, "prompts": prompts, "out": str(outs[number])}
            for number, (sequences, prompts) in enumerate(parts)
        ]
        with self.screen.bar(f"{kind}, {layout}", len(parts)) as advance:
            child.ask(
                "score",
                lambda note: advance(note["progress"], ""),
                layout=layout.words,
                contract=contract.to_json() if contract else None,
                rounds=rounds,
                longest=self.stage.longest,
                seed=self.options.seed,
                timeout=CHILD_SECONDS,
            )
        return [Recording.load(out) for out in outs]


def record(engine: Rollout, asked: Sequence[Request]) -> Recording:
    """What an engine answers, with the log-probability of every token that has a predecessor, and (with a contract) the digest of its full row."""
    answers = engine.sample(asked, prompts=True)
    sequences = [[*request.tokens, *answer.tokens] for request, answer in zip(asked, answers, strict=True)]
    logprobs = [[*answer.prompt, *answer.logprobs] for answer in answers]
    rows = None if engine.contract is None else [answer.rows for answer in answers]
    return Recording.of(sequences, [len(request.tokens) for request in asked], logprobs, rows)


def policy_weights(sequences: Sequence[Sequence[int]], prompts: Sequence[int]) -> list[list[float]]:
    """One weight for each token with a predecessor: 0 in prompts, else the sample's advantage over the batch.

    The reward is the share of different tokens in a sample. A tenth of plain likelihood is added, so that a batch of equal rewards
    trains too. Weights come from the whole batch, so they do not depend on micro-batches or ranks.
    """
    rewards = [len(set(sequence[prompt:])) / (len(sequence) - prompt) for sequence, prompt in zip(sequences, prompts, strict=True)]
    mean = float(np.mean(rewards))
    count = sum(len(sequence) - prompt for sequence, prompt in zip(sequences, prompts, strict=True))
    weights = []
    for sequence, prompt, reward in zip(sequences, prompts, rewards, strict=True):
        each = (reward - mean + 0.1) / count
        weights.append([0.0] * (prompt - 1) + [each] * (len(sequence) - prompt))
    return weights


def total(found: Iterator[Comparison]) -> Comparison:
    """All rounds as one comparison."""
    result = next(found)
    for more in found:
        result = result + more
    return result


def pretrain_stage(trainer: Trainer, options: Options, stage: Stage, screen: Screen) -> None:
    """Pre-train from random weights into ``stage.folder``; every rank."""
    assert stage.pretrain_from is not None
    trainer.load(stage.pretrain_from)
    trainer.train_with(lr=PRETRAIN["lr"], clip_grad=options.clip_grad)
    with screen.bar(f"pre-training {stage.name} with Megatron, {options.trainer}", options.pretrain_steps) as advance:
        pretrain(
            trainer,
            stage.stream,
            steps=options.pretrain_steps,
            seconds=options.pretrain_seconds,
            seed=options.seed,
            progress=lambda done, loss: advance(done, f"{done} steps, loss {loss:.2f}"),
            **PRETRAIN,
        )
    files = [stage.pretrain_from / name for name in ("tokenizer.json", "tokenizer_config.json")]
    trainer.export(stage.folder, files=[file for file in files if file.is_file()])


def _union(recordings: Sequence[Recording]) -> Asked:
    """Every different sequence once."""
    seen: dict[tuple[int, ...], int] = {}
    for recording in recordings:
        for sequence, prompt in zip(recording.sequences, recording.prompts.tolist(), strict=True):
            seen.setdefault(tuple(sequence), prompt)
    return [list(sequence) for sequence in seen], list(seen.values())

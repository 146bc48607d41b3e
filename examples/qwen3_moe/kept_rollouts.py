"""What a run of reinforcement learning sampled, kept step by step in a store."""

from __future__ import annotations

from pathlib import Path

from examples.qwen3_moe.grpo import Samples
from tio_megatron import kernels
from tio_megatron.contract import Contract
from tio_megatron.jobs.problems import InputProblem
from tio_megatron.rollouts import About, Batch, Store


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

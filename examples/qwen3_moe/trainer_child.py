"""Child process: Megatron in further layouts. Imports once, then forks the ranks of one layout after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.qwen3_moe.trainer import Trainer
from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import Contract
from tio_megatron.contract.words import TrainerLayout
from tio_megatron.jobs.children import report, serve
from tio_megatron.testing import run_ranks


def score(layout: str, contract: str | None, rounds: list[dict[str, Any]], longest: int, seed: int, timeout: float) -> dict[str, Any]:
    """Score every round's sequences with that round's weights in one layout; ``contract`` None is stock Megatron."""
    parsed = TrainerLayout.parse(layout)
    run_ranks(parsed.ranks, _score, parsed, contract, rounds, longest, seed, timeout=timeout)
    return {"ranks": parsed.ranks}


def _score(rank: int, layout: TrainerLayout, contract: str | None, rounds: list[dict[str, Any]], longest: int, seed: int) -> None:
    config = CheckpointConfig.from_file(Path(rounds[0]["weights"]) / "config.json")
    trainer = Trainer(config, layout, Contract.from_json(contract) if contract else None, longest=longest, seed=seed)
    for number, part in enumerate(rounds):
        trainer.load(Path(part["weights"]))
        recording = trainer.score(part["sequences"], part["prompts"])
        if recording is not None:
            recording.save(Path(part["out"]))
            report(number + 1, len(rounds), str(layout))
    trainer.close()


if __name__ == "__main__":
    serve({"score": score})

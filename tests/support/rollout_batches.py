"""Batches of rollouts that are the same every time."""

from __future__ import annotations

import numpy as np

from tio_megatron.rollouts import About, Batch

ABOUT = About("contract", "cpu 1", "weights", 3, 0.8, "vllm tp2", {"task": "sort", "lr": 1e-3})


def batch(seed: int = 0, sequences: int = 5, about: About = ABOUT, scored: bool = True) -> Batch:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 9, sequences)
    prompts = [int(draw.integers(1, length + 1)) for length in lengths]
    tokens = [draw.integers(0, 1000, length).tolist() for length in lengths]
    values = [(-draw.random(length - prompt)).astype(np.float32).tolist() for length, prompt in zip(lengths, prompts, strict=True)]
    rewards, groups = draw.random(sequences).tolist(), list(range(sequences))
    return Batch.of(about, tokens, prompts, values if scored else None, seeds=list(range(sequences)), rewards=rewards, groups=groups)

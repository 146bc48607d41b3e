"""What planted faults share: random places and sizes, two runs of which one is wrong, and what is right to say about them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from planted_model import Model, Plan, Sizes, weights_of

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass
class Truth:
    """What is right: ``kind``, one of ``causes``, and one of ``points`` (empty: any). ``parameter`` where one is at fault."""

    kind: str
    causes: tuple[str, ...]
    points: tuple[str, ...] = ()
    parameter: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    least: int = 1
    """Tokens that must differ for the fault to be there: what an order depends on cannot be seen on one token."""
    side: str = ""
    """Where it was planted."""


class Draw(random.Random):
    """Random places and sizes."""

    def sizes(self, dtype: torch.dtype | None = None, layers: int | None = None, moe: bool | None = None, **fixed: Any) -> Sizes:
        layers = layers or self.choice([1, 2, 3])
        kinds = tuple(self.random() < 0.7 if moe is None else moe for _ in range(layers))
        heads, kv = self.choice([(4, 2), (4, 4), (8, 2), (6, 3)])
        drawn = dict(
            layers=layers, hidden=self.choice([48, 64, 96]), heads=heads, kv=kv, head_dim=self.choice([8, 16, 24]), experts=self.choice([8, 12, 16]),
            top_k=self.choice([2, 3, 4]), width=self.choice([32, 48, 64]), vocab=self.choice([80, 97, 128]), dtype=dtype or self.choice([BF16, FP32]),
            moe=kinds, tied=self.random() < 0.3,
        )  # fmt: skip
        return Sizes(**(drawn | fixed))

    def sequences(self, sizes: Sizes, least: int = 4, most: int = 26, count: int | None = None) -> list[list[int]]:
        return [[self.randrange(sizes.vocab) for _ in range(self.randint(least, most))] for _ in range(count or self.randint(2, 4))]

    def layer(self, sizes: Sizes, moe: bool | None = None) -> int:
        fitting = [layer for layer in range(sizes.layers) if moe is None or sizes.moe[layer] == moe]
        return self.choice(fitting)


class Stage:
    """A folder for two traces; ``wrong`` runs the faulty side, which is A or B by chance."""

    def __init__(self, folder: Path, draw: Draw) -> None:
        self.folder, self.draw = folder, draw
        self.faulty = draw.choice("AB")

    def both(
        self,
        sizes: Sizes,
        sequences,
        wrong: Plan,
        right: Plan | None = None,
        weights=None,
        wrong_weights=None,
        passes=None,
        wrong_passes=None,
        wrong_sizes=None,
    ):
        weights = weights or weights_of(sizes, self.draw.randrange(1 << 30))
        sides = {"right": "B" if self.faulty == "A" else "A", "wrong": self.faulty}
        Model(sizes, weights, right).record(self.folder / sides["right"], sequences, passes)
        Model(wrong_sizes or sizes, wrong_weights or weights, wrong).record(self.folder / sides["wrong"], sequences, wrong_passes or passes)

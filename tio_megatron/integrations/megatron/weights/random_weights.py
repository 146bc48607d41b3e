"""Random weights drawn on the CPU (``use_cpu_initialization``) are those of the global problem: the same in every tensor, expert and data layout.

megatron-core draws every cut matrix whole and keeps its part, from one generator that all ranks seed alike. Two of its draws know the layout all
the same: a rank draws the experts it holds and no others, so that expert ranks hold copies of each other and everything after them is other
numbers; and the vocabulary is drawn with its padding, which depends on TP. Here every expert is drawn, and the vocabulary's true rows alone.

Draws on a GPU come from a generator of each rank and belong to the layout, as in stock. So do those of pipeline stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def whole(config: Any) -> bool:
    """Whether weights are drawn whole, on the CPU."""
    return bool(config.perform_initialization and config.use_cpu_initialization)


@contextlib.contextmanager
def true_rows(config: Any, rows: int, vocab: int) -> Iterator[None]:
    """While a model is built, its embedding of ``rows`` rows draws the ``vocab`` true ones; padding is zero.

    Releases whose ``config`` has no ``embedding_init_method`` only score (:mod:`.versions`), and a score has weights from a checkpoint.
    """
    draw = getattr(config, "embedding_init_method", None)
    if draw is None or not whole(config) or vocab == rows:
        yield
        return

    def draw_true(weight: torch.Tensor) -> Any:
        if weight.shape[0] != rows:
            return draw(weight)
        with torch.no_grad():
            weight[vocab:].zero_()
        return draw(weight[:vocab])

    config.embedding_init_method = draw_true
    try:
        yield
    finally:
        config.embedding_init_method = draw


@contextlib.contextmanager
def among_all_experts(config: Any, held: int, group: Any, *shapes: tuple[Any, tuple[int, int]]) -> Iterator[None]:
    """Around the drawing of this rank's ``held`` experts: draw, and drop, those of the expert-parallel ranks before and after it.

    Args:
        config: of the expert layer.
        held: experts of each rank.
        group: the expert-parallel group.
        shapes: the draws of one expert in their order, each a function that fills a matrix and the matrix's whole shape.
    """

    def drop(experts: int) -> None:
        if whole(config):
            for _ in range(experts):
                for draw, shape in shapes:
                    draw(torch.empty(shape, dtype=torch.float32))

    drop(held * group.rank())
    yield
    drop(held * (group.size() - group.rank() - 1))

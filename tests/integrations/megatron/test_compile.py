"""Megatron-core's transformer layers, compiled one by one, train with the bytes of eager mode: losses and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_megatron import Setup, ddp, last_stage, losses, on_ranks

from tio_megatron.contract import Layout
from tio_megatron.testing import assert_same_bytes, first_mismatch
from tio_megatron.testing.qwen3 import MOE, write_tiny

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("compiling")]
TOKENS = torch.randint(700, (2, 41), generator=torch.Generator().manual_seed(5))
INDUCTOR = dict(backend="inductor", options={"emulate_precision_casts": True})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("compiled") / "moe", MOE)


def eager_and_compiled(folder: Path, layout: Layout, how: dict[str, Any], ordered: bool = True) -> list[list[Any]]:
    """By rank: (loss per token, gradient buffers), once eager and once compiled."""

    def step(model: Any) -> Any:
        # Wrapped anew: DDP's sums remember the largest partial of the step before.
        wrapped = ddp(model)
        loss = losses(wrapped, [TOKENS], backward=True, weight=1 / 64)
        return loss, {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}

    def work(model: Any, _: Setup) -> list[Any]:
        eager = step(model)
        for layer in model.decoder.layers:
            layer.compile(**how)
        compiled = step(model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 10, "something was compiled"
        return [eager, compiled]

    return last_stage(on_ranks(Setup(folder, layout, ordered=ordered, padding=float("nan") if ordered else 0.0), work, timeout=500))


@pytest.mark.parametrize(
    "layout, how",
    [(Layout(), dict(backend="aot_eager_decomp_partition")), (Layout(), INDUCTOR), (Layout(tp=2, ep=2, etp=1, sp=True), dict(backend="aot_eager"))],
    ids=["decomposed", "inductor", "TP 2 EP 2"],
)
def test_compiled_layers(folder: Path, layout: Layout, how: dict[str, Any]) -> None:
    for eager, compiled in eager_and_compiled(folder, layout, how):
        assert_same_bytes(eager, compiled)


def test_stock_layers_differ(folder: Path) -> None:
    """Negative control."""
    for eager, compiled in eager_and_compiled(folder, Layout(), INDUCTOR, ordered=False):
        assert first_mismatch(eager, compiled)

"""A compiled engine gives the bytes of eager mode: the teacher's, in chunks and one by one, decoded and prefilled, before and after an update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.vllm import checkpoints
from tests.integrations.vllm.engines import Engine, prompts
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.integrations.vllm import push_weights

FULL = pytest.mark.full
CAPTURED = "TP 1, captured and run without Inductor"
ROWS = {
    CAPTURED: dict(),
    "TP 1": dict(),
    "TP 1 tied": dict(tied=True),
    "TP 1 dense fp32": dict(dense=True, dtype="float32"),
    "TP 2": dict(),
    "TP 2 EP 2": dict(dtype="float32"),
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=() if name == CAPTURED else FULL) for name in ROWS])
def compiled(request: pytest.FixtureRequest, folders: Path) -> Iterator[tuple[Engine, Path]]:
    """An engine that vLLM compiles as it does when nobody says otherwise, and a second checkpoint."""
    layout, fields = request.param, ROWS[request.param]
    first, second = (checkpoints.make(folders / f"compiled-{layout}-{seed}", seed, **fields) for seed in (11, 12))
    options: dict[str, Any] = dict(enforce_eager=False, max_num_batched_tokens=96, dtype=fields.get("dtype", "bfloat16"))
    if "TP 2" in layout:
        options |= dict(tensor_parallel_size=2, enable_expert_parallel="EP" in layout, distributed_executor_backend="mp")
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(disable=False):
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        patch.setenv("VLLM_CPU_CI_ENV", str(int(layout == CAPTURED)))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        with Engine.start(first, **options) as engine:
            yield engine, second


def test_bytes_of_eager_mode(compiled: tuple[Engine, Path]) -> None:
    engine, second = compiled
    engine.check(engine.generate(prompts((1, 5, 64, 65, 150), seed=70)), what="in chunks")
    if engine.llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size == 1:
        assert engine.model().model.compiled and torch._dynamo.utils.counters["stats"]["unique_graphs"], "a captured graph runs"
    engine.check(engine.generate(prompts((1, 70), seed=71), single=True), what="one by one")
    push_weights(engine.llm, Checkpoint(second).tensors(), engine.contract)
    after = engine.generate(prompts((5, 150), seed=72))
    engine.check(after, engine.teacher(second), what="after an update")
    with pytest.raises(AssertionError):
        engine.check(after, engine.teacher(), what="control: the weights before")


def test_an_id_outside_the_vocabulary_is_still_refused(compiled: tuple[Engine, Path]) -> None:
    engine, _ = compiled
    with pytest.raises((ValueError, RuntimeError), match="token ids 5 to 100000 are not inside the vocabulary"):
        engine.generate([[5, 100000]], tokens=1)

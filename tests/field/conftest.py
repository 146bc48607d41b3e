"""What several files share: one engine, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.vllm import checkpoints
from tests.integrations.vllm.engines import Engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """In this process, on checkpoint ``a``; ``second`` is checkpoint ``b`` of the same model. Prompts in chunks of 96 tokens, prefix cache on."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("load")
    with Engine.start(checkpoints.make(root / "a", 0), max_num_batched_tokens=96, enable_prefix_caching=True) as engine:
        engine.second = checkpoints.make(root / "b", 1)
        yield engine

"""Engines that the tests share: each starts once and serves all its cases. In one process, except those of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.vllm import checkpoints
from tests.integrations.vllm.engines import Engine

pytest.importorskip("vllm")


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def moe(folders: Path) -> tuple[Path, Path]:
    """Two checkpoints of one model: 16 experts, top-4, bf16, untied."""
    return checkpoints.make(folders / "moe-0", 0), checkpoints.make(folders / "moe-1", 1)


@pytest.fixture(scope="session")
def moe_fp32(folders: Path) -> tuple[Path, Path]:
    """The same sizes in fp32: where a wrong order in fp32 partial sums shows."""
    return checkpoints.make(folders / "moe-fp32-0", 5, dtype="float32"), checkpoints.make(folders / "moe-fp32-1", 6, dtype="float32")


@pytest.fixture(scope="session")
def chunked(moe: tuple[Path, Path]) -> Iterator[Engine]:
    """TP 1, top-4, bf16; prompts in chunks of 96 tokens, prefix cache on, raw log-probabilities."""
    with Engine.start(moe[0], max_num_batched_tokens=96, enable_prefix_caching=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def crowded(folders: Path) -> Iterator[Engine]:
    """TP 1, top-8, tied embeddings; whole prompts, pages for half of its requests, processed log-probabilities."""
    folder = checkpoints.make(folders / "top-8", 2, top_k=8, tied=True)
    with Engine.start(folder, max_num_batched_tokens=1024, max_model_len=512, num_gpu_blocks_override=13, logprobs_mode="processed_logprobs") as engine:
        yield engine


@pytest.fixture(scope="session")
def dense(folders: Path) -> Iterator[Engine]:
    """TP 1, dense Qwen3, fp32, tied embeddings."""
    options = dict(dense=True, dtype="float32", tied=True)
    second = checkpoints.make(folders / "dense-1", 4, **options)
    with Engine.start(checkpoints.make(folders / "dense-0", 3, **options), dtype="float32") as engine:
        engine.second = second
        yield engine

"""The order of the test files, and what several of them need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

LAST = Path(__file__).parent / "integrations" / "vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines in this process keep their process groups until it ends, so what starts them (imports ``Engine``) comes after all other tests."""
    items.sort(key=lambda item: LAST in item.path.parents or hasattr(getattr(item, "module", None), "Engine"))


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.compile`` compiles, though the tests of engines switch it off for their process."""
    import torch._dynamo

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()

"""The order of the test files."""

from pathlib import Path

import pytest

LAST = Path(__file__).parent / "integrations" / "vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines in this process keep their process groups until it ends, so what starts them comes after all other tests."""
    items.sort(key=lambda item: LAST in item.path.parents)

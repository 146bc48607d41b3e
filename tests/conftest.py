"""The two tiers of the tests, the order of the files, and what several of them need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CARE = {
    "every mistake that a user makes": ["bad_input", "commands/test_hard_input.py"],
    "damaged files": ["fuzz"],
    "what is installed": ["packaging"],
    "runs that the doctor reads": ["verify/doctor/test_dry_run.py", "verify/doctor/test_examine.py", "verify/doctor/test_workers.py"],
    "tables of the diagnosis": [
        "verify/test_beyond_rounding.py", "verify/test_masks_told.py", "verify/test_named_on_hf.py", "verify/test_no_sum.py", "verify/test_orders_named.py",
        "verify/test_told_apart.py", "verify/test_types_told.py", "verify/test_unseen.py", "verify/test_variants_named.py",
    ],
    "tools that start several engines": ["verify/matrix/test_matrix.py"],
    "how jobs start and end": ["launch", "job/test_alone.py", "job/test_endings.py", "job/test_ranks.py", "job/test_rl.py"],
    "several hosts": ["multinode/test_hosts.py", "multinode/test_lost.py"],
    "optional packages and another device": [
        "integrations/megatron/test_other_device.py", "integrations/megatron/test_readme.py", "integrations/megatron/test_transformer_engine.py",
        "integrations/megatron_lm/test_pretrain_gpt.py", "integrations/mindspeed/test_mindspeed.py",
    ],
}  # fmt: skip
"""Files and folders, below this one, of the care tier: each test of them has the mark ``full``. Single tests and rows are marked where they stand."""
ENGINES_LAST = TESTS / "integrations" / "vllm"


def in_care(path: Path) -> bool:
    """Whether all tests of the file ``path`` are of the care tier."""
    return any(TESTS / name in (path, *path.parents) for names in CARE.values() for name in names)


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis takes the same examples on every run and machine, with no time limit on one: a machine may be slow."""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("tio", deadline=None, derandomize=True)
        settings.load_profile("tio")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines in this process keep their process groups until it ends, so what starts them (imports ``Engine``) comes after all other tests."""
    for item in items:
        if in_care(item.path):
            item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: ENGINES_LAST in item.path.parents or hasattr(getattr(item, "module", None), "Engine"))


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

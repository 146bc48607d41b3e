"""A copy of the checkout to build, install and break."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", ".cache", "out", "dist", "lib.*", "bdist.*", "*.so", "*.built", "*.egg-info", "__pycache__", ".*_cache")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The checkout's files, and its compiled objects (build/kernels) so that the C++ library is linked and not compiled again."""
    return Path(shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=LEFT_OUT))

"""Skips that cannot be overlooked: what needs a tool, root or the network is skipped aloud on somebody's machine, and fails in CI, which brings them."""

import os
import warnings
from typing import NoReturn

import pytest


def skip_loudly(why: str) -> NoReturn:
    """Skip with ``why``, among the warnings too, which pytest prints at its end."""
    warnings.warn(f"NOT RUN: {why}", stacklevel=2)
    pytest.skip(f"NOT RUN: {why}")


def skip_outside_ci(why: str) -> NoReturn:
    """:func:`skip_loudly`; where ``CI`` is set, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must run this, and cannot: {why}", pytrace=False)
    skip_loudly(why)

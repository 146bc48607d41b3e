"""A stand-in for Transformer Engine, written for these tests: class names, parameter names and shapes, and a note of whatever is built or called.

It computes nothing. ``NOTES`` names what megatron-core took from it.
"""

from types import SimpleNamespace

__version__ = "2.5.0"
NOTES = []


class _DelayedScaling:
    pass


common = SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=_DelayedScaling))

from transformer_engine import pytorch  # noqa: E402, F401

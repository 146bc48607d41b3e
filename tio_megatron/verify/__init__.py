"""Compares and explains: where two sides differ, and why. Nothing that trains or serves imports it, and it changes no byte."""

from tio_megatron.verify.compare import Comparison, compare
from tio_megatron.verify.recording import Recording

__all__ = ["Comparison", "Recording", "compare"]

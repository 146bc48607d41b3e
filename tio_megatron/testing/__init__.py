"""Helps tests: compares bytes, runs ranks as real processes, poisons buffers. No order and no arithmetic of the package lives here."""

from tio_megatron.testing.bytes import Mismatch, assert_same_bytes, first_mismatch
from tio_megatron.testing.poison import poison
from tio_megatron.testing.ranks import RankError, run_ranks

__all__ = ["Mismatch", "RankError", "assert_same_bytes", "first_mismatch", "poison", "run_ranks"]

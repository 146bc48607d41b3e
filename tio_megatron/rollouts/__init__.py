"""Rollouts on disk: what was sampled, by which weights, under which contract. Stores and hands out; never scores, never learns, names no engine.

A store is a folder of safetensors files, one per batch, never rewritten; the format is in ``docs/rollouts.md``.
"""

from tio_megatron.rollouts.batch import About, Batch
from tio_megatron.rollouts.draw import Drawn, draw
from tio_megatron.rollouts.errors import StoreError
from tio_megatron.rollouts.store import Audit, Place, Store
from tio_megatron.rollouts.verl_dump import from_verl

__all__ = ["About", "Audit", "Batch", "Drawn", "Place", "Store", "StoreError", "draw", "from_verl"]

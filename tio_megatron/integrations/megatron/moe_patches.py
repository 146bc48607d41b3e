"""Patches for mixture-of-experts layers: none, every part has a seam in the layer spec."""

from __future__ import annotations

from tio_megatron.integrations.patching import Patch


def moe_patches() -> tuple[Patch, ...]:
    """The patches an expert layer needs beyond its spec."""
    return ()

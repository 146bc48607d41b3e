"""Patches for mixture-of-experts layers."""

from __future__ import annotations

from tio_megatron.integrations.megatron.registry import Patch


def moe_patches() -> tuple[Patch, ...]:
    """The patches an expert layer needs beyond its spec."""
    return ()

"""The list of patches that :func:`tio_megatron.apply` installs into megatron-core."""

from __future__ import annotations

from tio_megatron.integrations.megatron.moe_patches import moe_patches
from tio_megatron.integrations.megatron.registry import Patch


def all_patches() -> list[Patch]:
    """Every patch, dense and mixture-of-experts."""
    return [*moe_patches()]

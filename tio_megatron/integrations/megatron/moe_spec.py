"""Our modules in the place of a stock mixture-of-experts layer."""

from __future__ import annotations

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def moe_refusals(config: TransformerConfig) -> list[str]:
    """One line per option of ``config`` that an expert layer cannot obey."""
    return []


def moe_spec(stock: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Our spec for the layer that ``stock`` (whose module is ``MoELayer``) describes."""
    raise ValueError("mixture-of-experts layers are not supported yet")

"""Which classes take part in an engine, by its platform: our layers, our attention, and what of the platform's may stand beside them."""

from __future__ import annotations

from dataclasses import dataclass

from tio_megatron.integrations.vllm import platforms


@dataclass(frozen=True)
class Parts:
    """What :mod:`.scoped` puts in while a model is built.

    Args:
        replacements: class name of vLLM -> ours, for the out-of-tree registry.
        attention: the backend that vLLM's ``Attention`` is given.
        harmless: layer classes that may be built inside ours because they are never called.
    """

    replacements: dict[str, type]
    attention: type
    harmless: frozenset[str]


def chosen() -> Parts:
    """The parts of this process's platform."""
    from tio_megatron.integrations.vllm import layers

    if platforms.is_ascend():
        from tio_megatron.integrations.vllm.ascend import attention, experts, seam

        return Parts({**layers.REPLACEMENTS, **experts.REPLACEMENTS}, attention.TioAscendAttentionBackend, frozenset(seam.HARMLESS))
    from tio_megatron.integrations.vllm import moe
    from tio_megatron.integrations.vllm.attention import TioAttentionBackend

    return Parts({**layers.REPLACEMENTS, **moe.REPLACEMENTS}, TioAttentionBackend, frozenset({"ApplyRotaryEmb", "MoERunner"}))

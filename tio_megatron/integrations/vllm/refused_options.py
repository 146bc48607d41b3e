"""vLLM's options that are refused wherever an engine runs, as one table for its start (:mod:`.refusals`) and for the doctor before it."""

from __future__ import annotations

MODEL_SWITCHES = {
    "trust_remote_code": ("no code of a checkpoint is run here", "leave it out"),
    "enable_prompt_embeds": ("prompts are token ids", "give token ids"),
    "enable_return_routed_experts": ("our layers do not hand out which experts were chosen", "leave it out"),
}
"""Of the model, that must be off: why, and what works."""


def cache_dtype(asked: str, computed: str) -> str | None:
    """What is wrong with pages of type ``asked`` in an engine that computes in ``computed``; types without ``torch.``.

    >>> cache_dtype("auto", "bfloat16"), cache_dtype("float32", "bfloat16")
    (None, 'kv_cache_dtype float32: use auto')
    """
    return None if asked in ("auto", computed) else f"kv_cache_dtype {asked}: use auto"


def positions(longest: int, held: int) -> str | None:
    """What is wrong with sequences of ``longest`` tokens for a model of ``held`` positions.

    >>> positions(40961, 40960)
    'max_model_len 40961: the model has 40960 positions'
    """
    return None if longest <= held else f"max_model_len {longest}: the model has {held} positions"

"""MindSpeed's ways of context parallelism, and how keys move here instead. Names settings; moves nothing.

Under a contract whole sequences are put together and attention runs as on one rank (:mod:`tio_megatron.layers.context`): heads by all-to-all where
query and key/value heads divide by the ranks (what Ulysses does), tokens by all-gather otherwise. Partial softmaxes are never merged, so a ring has
nothing to do. What a setting still decides is how a sequence is **cut**, and the cut must be the contract's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tio_megatron.findings.finding import Finding
from tio_megatron.integrations.mindspeed import manager


@dataclass(frozen=True)
class Way:
    """One value of ``context_parallel_algo``."""

    algorithm: str
    cut: str
    taken: bool
    instead: str


_CHUNKS = "2 * cp chunks, rank r has r and 2 * cp - 1 - r"
_RING = "megatron_cp_algo would work: the same cut as stock's, and heads move by all-to-all where they divide"

WAYS = (
    Way("megatron_cp_algo", _CHUNKS, True, "ring and double ring: no ring; all-to-all of heads, or all-gather of tokens"),
    Way("kvallgather_cp_algo", _CHUNKS, True, "gathered keys: all-to-all of heads, or all-gather of tokens"),
    Way("ulysses_cp_algo", "cp slices, one after another", False, _RING),
    Way("hybrid_cp_algo", "2 * ring chunks, each pair cut in slices", False, _RING),
    Way("adaptive_cp_algo", "by an attention mask", False, _RING),
    Way("hybrid_adaptive_cp_algo", "by an attention mask", False, _RING),
)


def refusals(config: Any) -> list[Finding]:
    """What is found if ``config``, or the arguments that MindSpeed reads now, cut sequences in another way than the contract."""
    if not manager.present() or config.context_parallel_size < 2:
        return []
    found = (refusal(getattr(source, "context_parallel_algo", None)) for source in (config, manager.arguments()))
    return [finding for finding in found if finding is not None][:1]


def refusal(algorithm: str | None) -> Finding | None:
    """What is found if a value of ``context_parallel_algo`` (None: its default) cuts sequences in another way than the contract.

    >>> refusal("ulysses_cp_algo").what
    "context_parallel_algo='ulysses_cp_algo': it cuts a sequence in cp slices, one after another"
    """
    name = algorithm or "megatron_cp_algo"
    way = next((way for way in WAYS if way.algorithm == name), None)
    if way is not None and way.taken:
        return None
    cut = "an unknown cut" if way is None else f"it cuts a sequence in {way.cut}"
    return Finding(cut, _RING, "context_parallel_algo", name)

"""Which side is off: told where the evidence tells it, else why it cannot be told.

A side that follows another formula than the other is compared with the *usual* one: that of Qwen3's published configuration and of the contract, which every
table of rules names first. Departing from it may be an engine's convention and no mistake; the reason says so where a configuration decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.rules import Explained

_STATED = {"norm-epsilon": "norm_eps", "rope-theta": "rope_theta"}
"""Axes whose usual value the traces state, as which fact."""
_CONFIGURED = {
    "activation": "hidden_act",
    "attention-scale": "head_dim (some models have a scale of their own)",
    "norm-epsilon": "rms_norm_eps",
    "norm-weight": "kind of norm",
    "norm-mean": "kind of norm",
    "rope-theta": "rope_theta",
    "rope-pairs": "rotary style",
    "router-normalise": "norm_topk_prob",
    "scale": "scaling factors",
}
"""Axes that the checkpoint decides, by which setting."""
_USUAL = {"router-sum-order": ("by ascending id", "library")}
"""Where the contract's rule is not the first; torch's sum of so few numbers is the same."""
_SAME, _OTHER = 0.03, 0.5
"""A side computes the usual function if it is nearer to it than this part of the difference, and another one if it is farther than that part."""
_NOBODY = {
    "order": "no side is wrong: both add the same terms, each in its own order",
    "unknown": "the cause is not known",
    "weights": "two traces do not say which of them holds the checkpoint's parameter: compare both with the checkpoint",
    "equal": "nothing differs",
}
_NOT_TOLD = {
    "drift": "neither chose wrongly: the logits had moved before",
    "tie": "the logits are equal, so either choice is a largest one, and neither side always takes the lower id",
    "shape": "the sizes do not say which configuration is the checkpoint's",
    "scale": "either side may carry the factor, or lack it: the configuration's scaling factors decide",
    "positions": "the positions themselves were not kept: record with --keep positions",
    "hang": "neither run ended",
}


def departing(explained: Explained, stated: dict[str, Sequence[object]]) -> tuple[str, str]:
    """(side, reason) of two sides that follow other rules: the one whose first differing axis is not the usual rule's.

    Args:
        explained: with axes.
        stated: distinct values of the facts in ``_STATED``, A's first.
    """
    axis = explained.axes[0]
    if explained.ambiguous:
        return "", "other rules explain the sides as well: " + ", ".join(explained.ambiguous)
    values = {"A": explained.a.rule.axes[axis], "B": explained.b.rule.axes[axis]}
    fine = _USUAL.get(axis, (explained.usual.axes[axis],))
    usual = fine[0]
    decides = f"; the checkpoint's {_CONFIGURED[axis]} decides" if axis in _CONFIGURED else ""
    if len(stated.get(_STATED.get(axis, ""), ())) > 1:
        return "", f"the sides state other values for {_STATED[axis]}{decides}"
    near, far = sorted(explained.far)
    if near < _SAME * explained.gap and far > _OTHER * explained.gap:  # other steps to one function: "after top-k" of a softmax that sums to 1
        side = "AB"[explained.far.index(far)]
        return side, f"{side} departs from the usual ({usual}), which gives the other side up to {near:.2g}{decides}"
    off = [side for side, value in values.items() if value not in fine]
    if len(off) == 1:
        return off[0], f"{off[0]} departs from the usual ({usual}){decides}"
    return "", f"both depart from the usual ({usual}): A {values['A']}, B {values['B']}{decides}"


def with_reason(found: Finding) -> Finding:
    """The finding with why its side is named, or why none is."""
    if found.side_reason:
        return found
    if found.side:
        return replace(found, side_reason="told by the evidence")
    reason = _NOT_TOLD.get(found.cause) or _NOBODY.get(found.kind) or "the evidence is the same seen from either side"
    return replace(found, side_reason=reason)

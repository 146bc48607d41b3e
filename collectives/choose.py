"""Which schedule a call takes, and what is refused before anything is sent."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from tio_megatron.collectives import plan, wire
from tio_megatron.collectives.failure import Call

SWITCH_BYTES = 2 << 20
"""Up to this many bytes of input ``auto`` takes ``doubling``, above it ``scatter``; measured over gloo by ``benchmarks/collectives.py``.

Two ranks always take ``doubling``: both send the same bytes, and it has one hop less."""

_CHECK_BYTES = 4096


def switch_bytes() -> int:
    """The switch point in force: ``TIO_COLLECTIVE_SWITCH_BYTES``, or :data:`SWITCH_BYTES`. Must be the same on all ranks.

    Raises:
        ValueError: the variable is not a whole number of at least 0.
    """
    text = os.environ.get("TIO_COLLECTIVE_SWITCH_BYTES", "")
    if not text:
        return SWITCH_BYTES
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"TIO_COLLECTIVE_SWITCH_BYTES={text!r} is not a whole number of bytes, such as {SWITCH_BYTES}")
    return int(text)


def schedule_for(schedule: str, nbytes: int, size: int, *, scattered: bool = False) -> str:
    """Resolve ``auto`` for ``nbytes`` on each of ``size`` ranks; ``scattered`` is a reduce-scatter, which has no ``doubling``.

    Raises:
        ValueError: the schedule is unknown or has no form for this collective.
    """
    known = tuple(s for s in plan.SCHEDULES if not (scattered and s == "doubling"))
    if schedule == "auto":
        forced = os.environ.get("TIO_COLLECTIVE_SCHEDULE", "")
        if forced and forced not in plan.SCHEDULES:
            raise ValueError(f"TIO_COLLECTIVE_SCHEDULE={forced!r} is unknown; known are {', '.join(plan.SCHEDULES)}")
        if forced in known:
            return forced
        return "scatter" if scattered or (nbytes > switch_bytes() and size > 2) else "doubling"
    if schedule not in known:
        what = "reduce-scatter" if scattered else "all-reduce"
        raise ValueError(f"{what}: unknown schedule {schedule!r}; these work: auto, {', '.join(known)}")
    return schedule


def check_sum(what: str, x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Refuse a sum of anything but fp32, and a call that autograd would lose; returns the result's dtype.

    Raises:
        ValueError: names the dtype and what would work.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"{what}: sums between ranks are fp32 only, got {x.dtype}; pass fp32 partial sums and out_dtype={x.dtype} to round once at the root")
    check_no_grad(what, x)
    out_dtype = torch.float32 if out_dtype is None else out_dtype
    if not out_dtype.is_floating_point or out_dtype == torch.float64:
        raise ValueError(f"{what}: out_dtype must be float32 or a narrower floating-point type, got {out_dtype}")
    return out_dtype


def check_no_grad(what: str, x: torch.Tensor) -> None:
    """Refuse a tensor whose gradient would be lost.

    Raises:
        ValueError: autograd is recording and ``x`` requires a gradient.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{what}: not differentiable; use the functions of tio_megatron.layers, or torch.no_grad()")


def check_rows(what: str, name: str, splits: Any, rows: int | None, size: int) -> list[int]:
    """``splits`` as one count of rows per rank that sum to ``rows`` (any sum for None).

    Raises:
        ValueError: another number of counts, a negative one, or another sum.
    """
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0 or (rows is not None and sum(counts) != rows):
        total = "" if rows is None else f" that sum to {rows} rows"
        raise ValueError(f"{what}: {name} must be {size} counts{total}, one per rank, got {counts}")
    return counts


def check_agreement(what: str, group: wire.Group, same: dict[str, Any], to: list[int] | None = None, source: list[int] | None = None) -> None:
    """With ``TIO_COLLECTIVE_CHECK=1``: all ranks compare what they are about to do. Off, a mismatch may hang or fail inside the backend.

    Args:
        what: name of the collective.
        group: its group.
        same: what must be equal on all ranks.
        to: rows this rank sends to each; must be what the other expects in its ``source``.
        source: rows this rank expects from each.

    Raises:
        ValueError: names the ranks that differ and how.
    """
    if os.environ.get("TIO_COLLECTIVE_CHECK", "") in ("", "0"):
        return
    _, size = wire.place(group)
    described = {"what": what, **{key: _words(value) for key, value in same.items()}}
    text = json.dumps([described, to, source]).encode()
    if len(text) > _CHECK_BYTES:
        raise ValueError(f"TIO_COLLECTIVE_CHECK: the description of {what} over {size} ranks has {len(text)} bytes, {_CHECK_BYTES} fit; switch the check off")
    mine = torch.tensor(list(text.ljust(_CHECK_BYTES)), dtype=torch.uint8, device=wire.device(group))
    everybody = torch.empty(size * _CHECK_BYTES, dtype=torch.uint8, device=mine.device)
    each = [_CHECK_BYTES] * size
    assert group is not None, "one rank alone agrees with itself"
    with Call(f"the check before {what}", group) as call:
        wire.all_to_all(everybody, each, mine.repeat(size), each, group, call.deadline)
    heard = [json.loads(bytes(text)) for text in everybody.view(size, _CHECK_BYTES).tolist()]
    wrong = [f"rank {peer}: {heard[peer][0]}" for peer in range(size) if heard[peer][0] != heard[0][0]]
    if wrong:
        raise ValueError(f"{what}: ranks do not agree; rank 0: {heard[0][0]}; " + "; ".join(wrong))
    for a in range(size):
        for b in range(size):
            if heard[a][1] is not None and heard[a][1][b] != heard[b][2][a]:
                raise ValueError(f"{what}: rank {a} sends {heard[a][1][b]} rows to rank {b}, which expects {heard[b][2][a]}")


def _words(value: Any) -> str:
    return f"({', '.join(map(_words, value))})" if isinstance(value, tuple | list) else str(value)

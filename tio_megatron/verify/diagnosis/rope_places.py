"""At which positions a side turned its rows, solved from what went in and what came out. Legend: r rows, n heads, D head size."""

from __future__ import annotations

import math

import torch


def turned_by(x: torch.Tensor, out: torch.Tensor, theta: float) -> torch.Tensor | None:
    """[r] real positions that turn ``x`` into ``out`` ([r, n, D], halves together) with ``theta``; None where no position does.

    The slowest pair gives the position roughly and without a doubt, every faster one to its own precision: its whole turns are taken from the last estimate.
    """
    half = x.shape[-1] // 2
    a = torch.complex(x[..., :half], x[..., half:])
    b = torch.complex(out[..., :half], out[..., half:])
    angle = (b * a.conj()).sum(1).angle()  # [r, D/2]
    speed = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    place = angle[:, -1] / speed[-1]
    for pair in range(half - 2, -1, -1):
        turns = ((place * speed[pair] - angle[:, pair]) / (2 * math.pi)).round()
        place = (angle[:, pair] + 2 * math.pi * turns) / speed[pair]
    left = place[:, None] * speed - angle
    error = (left - (left / (2 * math.pi)).round() * 2 * math.pi).abs().median()
    return place if float(error) < 0.02 else None


def in_words(place: torch.Tensor, own: torch.Tensor) -> tuple[str, str, torch.Tensor] | None:
    """(axis, words, exact positions [r]) of solved positions ``place`` against ``own`` [r]; None where they are the row's own."""
    whole = place.round()
    moved = own > 0
    if bool(((place - whole).abs() < 0.05).all()):
        if torch.equal(whole, own):
            return None
        shift = (whole - own).unique()
        if len(shift) == 1:
            far = int(shift)
            return "positions", f"{abs(far)} {'later' if far > 0 else 'earlier'}", whole
        for width in range(2, int(own.max()) + 1):
            if torch.equal(own % width, whole):
                return "positions", f"counted anew every {width} tokens", whole
    if bool(moved.any()):
        factor = float((place[moved] * own[moved]).sum() / own[moved].square().sum())
        if abs(factor) > 1e-6 and bool(((place - factor * own).abs() < 0.05 + 1e-3 * own).all()):
            nice = 1 / round(1 / factor, 2) if abs(factor) < 1 else round(factor, 2)
            return "rope-theta", f"positions times {nice:.6g} (linear scaling)", own * nice
    if bool(((place - whole).abs() < 0.05).all()):
        return "positions", "others for each token", whole
    return None

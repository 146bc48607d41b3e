"""One pair of traces with a plan on one side, and what the diagnosis says of it."""

from __future__ import annotations

from faults import examine
from planting import Draw, Stage


def planted(folder, seed, plan, **more):
    """One pair with ``plan(draw, sizes) -> (place, Plan)``: (finding, place, the side drawn)."""
    draw = Draw(400 + seed)
    sizes = draw.sizes(**more)
    stage = Stage(folder, draw)
    place, wrong = plan(draw, sizes)
    stage.both(sizes, draw.sequences(sizes, 24, 40, count=3), wrong)
    return examine(folder), place, stage.faulty

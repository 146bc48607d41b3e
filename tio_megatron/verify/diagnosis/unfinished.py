"""Runs that never ended: where each rank stands, and who waits for whom."""

from __future__ import annotations

from tio_megatron.traces.reader import Trace, Unfinished
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.finding import Finding


def stopped(a: Trace | Unfinished, b: Trace | Unfinished) -> Finding:
    """Why the unfinished one stopped; a rank that had no token is the usual reason."""
    side = "A" if isinstance(a, Unfinished) else "B"
    run = a if isinstance(a, Unfinished) else b
    assert isinstance(run, Unfinished)
    both = ("neither run ended",) if isinstance(a, Unfinished) and isinstance(b, Unfinished) else ()
    lines = [
        f"rank {entry['rank']}: last point {entry['point']}, {entry['rows']} tokens there, at most {entry['most_rows']} in any pass" for entry in run.ranks
    ]
    # Ranks of one group pass the same points; one without tokens is what has to be looked at, wherever it stopped.
    empty = [entry for entry in run.ranks if entry["rows"] == 0 and any(other["rows"] > 0 for other in run.ranks)]
    stands = {entry["point"] for entry in run.ranks}
    busy = next((entry for entry in run.ranks if entry["rows"] > 0), run.ranks[0])
    point = str(busy["point"])
    layer = int(point.split(".")[1]) if point.startswith("layers.") else None
    if empty:
        names = ", ".join(f"rank {entry['rank']}" for entry in empty)
        said = f"{names} had no token and stands at {empty[0]['point']}; rank {busy['rank']} waits behind {point}"
        return Finding(
            "unfinished",
            "no-token-rank",
            point,
            layer,
            side=side,
            evidence=(said, *lines, *both),
            cure=CURES["no-token-rank"],
            details={"ranks": [e["rank"] for e in empty]},
        )
    said = (
        "the ranks stand at different points"
        if len(stands) > 1
        else "all ranks stand at the same point: the run was ended there, or a collective behind it never returned"
    )
    return Finding("unfinished", "hang", point, layer, side=side, evidence=(said, *lines, *both), cure=CURES["hang"])

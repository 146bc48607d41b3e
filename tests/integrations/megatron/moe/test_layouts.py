"""An expert layer gives the same bytes in every layout, and every row notices a wrong order planted on that same row."""

import moe_world as world
import pytest

from tio_megatron.testing import assert_same_bytes, first_mismatch

LAYOUTS = ((1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 4), (4, 2, 1), (4, 2, 2), (4, 4, 1))
"""tp, ep, etp. With tp there is sequence parallelism."""
INFERENCE = ((2, 2, 1), (2, 1, 2), (4, 2, 2))
"""Without sequence parallelism every rank of tp holds all positions; stock refuses that in training."""
VARIANTS = [(k, dtype, grouped) for grouped in (True, False) for k, dtype in ((4, "fp32"), (8, "bf16"), (2, "fp32"), (8, "fp32"), (4, "bf16"), (2, "bf16"))]


def table():
    """Every layout with both dispatchers and every variant. CI takes one variant of each, turning; the rest is marked ``full``."""
    turn = 0
    for layouts, inference in ((LAYOUTS, False), (INFERENCE, True)):
        for tp, ep, etp in layouts:
            for way in ("alltoall", "allgather"):
                for i, (k, dtype, grouped) in enumerate(VARIANTS):
                    row = world.Row(tp=tp, ep=ep, etp=etp, way=way, k=k, dtype=dtype, grouped=grouped, inference=inference)
                    mark = () if i == turn % len(VARIANTS) else (pytest.mark.full,)
                    yield pytest.param(row, marks=mark, id=str(row))
                turn += 1


@pytest.mark.parametrize("row", table())
def test_every_layout_gives_the_bytes_of_one_rank(row):
    p, expected, plants = world.problem(row), world.alone(row), world.plants_for(row)

    def work(rank):
        layer = world.build(row)
        place, found = world.step(layer, row, p.x, None if row.inference else p.dout)
        for name in plants:
            with world.PLANTS[name]():
                found[name] = world.step(layer, row, p.x)[1]["out"]
        return place, found

    results = world.run(row, work)
    for name in ("out",) if row.inference else ("out", "dx"):
        assert_same_bytes(world.gather(results, name), expected[name], f"{row}: {name}")
    for name in plants:
        assert first_mismatch(world.gather(results, name), expected["out"]) is not None, f"{row} does not notice {name}"

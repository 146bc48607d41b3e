"""A whole Qwen3-MoE through stock GPTModel under ``apply()``: the same fp32 log-probabilities in every layout."""

from types import SimpleNamespace

import pytest

from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

ROWS = [
    dict(tp=2, ep=2),
    dict(tp=2, ep=2, way="allgather", k=8, dtype="bfloat16", grouped=False),
    dict(tp=2, etp=2, way="allgather", grouped=False),
    dict(ep=2, way="allgather", k=8),
    dict(ep=4, dtype="bfloat16"),
    dict(tp=4, ep=4, k=8),
    dict(tp=4, ep=2, etp=2, way="allgather"),
    dict(tp=4, etp=4),
    dict(pp=2, ep=2, tp=2, way="allgather"),
    dict(pp=2, ep=2, k=2, dtype="bfloat16"),
    dict(tp=2, ep=2, etp=2, inference=True),
]
FULL = [
    dict(tp=tp, ep=ep, etp=etp, pp=pp, way=way, k=k, dtype=dtype, grouped=grouped, inference=inference)
    for tp, ep, etp, pp, inference in (
        *((tp, ep, etp, 1, False) for tp, ep, etp in ((2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1), (4, 1, 4), (4, 2, 1), (4, 2, 2), (4, 4, 1))),
        *((tp, ep, etp, 2, False) for tp, ep, etp in ((1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 1))),
        *((tp, ep, etp, 1, True) for tp, ep, etp in ((2, 2, 1), (4, 1, 4), (4, 2, 2))),
    )
    for way in ("alltoall", "allgather")
    for k, dtype, grouped in ((2, "float32", True), (4, "bfloat16", False), (8, "float32", False))
]


def table():
    for row in ROWS:
        yield pytest.param(row, id=name(row))
    for row in FULL:
        yield pytest.param(row, id=name(row), marks=pytest.mark.full)


def name(row):
    return "-".join(f"{key}{value}" if type(value) is int else key if value is True else str(value) for key, value in row.items() if value is not False)


@pytest.mark.parametrize("fields", table())
def test_every_layout_gives_the_log_probabilities_of_one_rank(world, models, fields):
    row = models.Row(**fields)
    kind = SimpleNamespace(dtype="bf16" if row.dtype == "bfloat16" else "fp32", k=row.k, etp=row.etp, ep=row.ep, way=row.way)
    plants = {name: world.PLANTS[name] for name in world.plants_for(kind)}
    results = run_ranks(row.world, models.scores, row, plants, timeout=300)
    expected = models.alone(row.k, row.dtype)
    assert_same_bytes(models.joined(results, "ours"), expected, str(row))
    for name in plants:
        assert first_mismatch(models.joined(results, name), expected) is not None, f"{row} does not notice {name}"

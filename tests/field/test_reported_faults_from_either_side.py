"""What public reports met, planted: kind, cause, place and side are named, the same with the traces exchanged; *unknown* where nothing tells."""

import pytest
from faults import examine, exchanged, right
from planted_faults import FAULTS, plant
from planted_reports import REPORTED


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("maker", REPORTED, ids=lambda maker: maker.__name__)
def test_it_is_named(maker, seed, tmp_path):
    truth = plant(FAULTS.index(maker) + 1, seed, tmp_path / "pair")
    found = examine(tmp_path / "pair")
    assert right(found, truth) and found.side in ("", truth.side), f"{found}\nplanted: {truth}"
    assert found.status == (2 if truth.kind == "unknown" else 1) and found.evidence and found.cure, found
    assert exchanged(tmp_path / "pair", found), found


@pytest.mark.parametrize("seed", range(4))
def test_moved_rows_are_those_of_the_side_that_moved_them(seed, tmp_path):
    truth = plant(FAULTS.index(next(maker for maker in REPORTED if maker.__name__ == "moved_rows")) + 1, 20 + seed, tmp_path / "pair")
    found = examine(tmp_path / "pair")
    assert (found.cause, found.side) == ("moved-rows", truth.side) and "capacity" not in found.cure, f"{found}\nplanted: {truth}"

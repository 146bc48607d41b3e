"""Variants of every kind of fault at other places, sizes, layers and types, the sides' columns cut over other ranks; two faults at once; both directions."""

import pytest
from faults import examine, exchanged, right
from planted_faults import FAULTS
from planted_variants import VARIANTS, plant_variant

MAKERS = [*VARIANTS, *FAULTS]


@pytest.mark.parametrize("index", range(len(MAKERS)), ids=[maker.__name__ for maker in MAKERS])
def test_a_variant_is_named_from_either_side(index, tmp_path):
    truth = plant_variant(index, 500, tmp_path)
    found = examine(tmp_path)
    assert right(found, truth), f"{found}\nplanted: {truth}"
    assert found.side in ("", truth.side) and found.side_reason, f"{found}\nplanted: {truth}"
    assert exchanged(tmp_path, found), found


@pytest.mark.full
@pytest.mark.parametrize("seed", range(501, 509))
@pytest.mark.parametrize("index", range(len(MAKERS)), ids=[maker.__name__ for maker in MAKERS])
def test_more_variants(index, seed, tmp_path):
    truth = plant_variant(index, seed, tmp_path)
    found = examine(tmp_path)
    assert right(found, truth), f"{found}\nplanted: {truth}"

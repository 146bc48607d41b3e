"""The tour prints what its pages show."""

from pathlib import Path

import notebooks

TOUR = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def test_every_cell_prints_what_is_shown():
    held = notebooks.read(TOUR)
    assert notebooks.run(held) == [notebooks.printed(cell) for cell in notebooks.code(held)], "python tests/support/notebooks.py examples/tour.ipynb remakes it"
    assert all(notebooks.printed(cell) for cell in notebooks.code(held)), "a cell that prints nothing shows nothing"


def test_a_cell_that_fails_is_seen():
    held = {"cells": [{"cell_type": "code", "source": ["print(1)\n", "raise KeyError('gone')"], "outputs": []}]}
    try:
        notebooks.run(held)
    except KeyError:
        return
    raise AssertionError("an error in a cell went by")

"""The table of MindSpeed's options, and the page that shows it."""

import re
from pathlib import Path

import pytest

from tio_megatron.integrations.mindspeed import context, options

PAGE = (Path(__file__).parents[3] / "docs" / "mindspeed.md").read_text()


def test_no_option_is_there_twice():
    assert len(options.NAMES) == len(options.OPTIONS)


@pytest.mark.parametrize("verdict", ["mapped", "refused", "harmless"])
def test_the_page_has_every_option_under_its_verdict(verdict):
    section = PAGE.split(f"**{verdict.capitalize()}**", 1)[1].split("\n**", 1)[0]
    shown = {name: row.rsplit("|", 2)[1].strip() for row in section.splitlines() for name in re.findall(r"`(\w+)`", row.rpartition("|")[0].rpartition("|")[0])}
    assert {option.name: option.why for option in options.rows(verdict)}.items() <= shown.items()


def test_the_page_has_every_way_of_context_parallelism():
    rows = {name: row for row in PAGE.splitlines() if "_cp_algo`" in row and row.startswith("|") for name in re.findall(r"`(\w+_cp_algo)`", row.split("|")[1])}
    for way in context.WAYS:
        assert way.taken == rows[way.algorithm].rstrip("| ").endswith("mapped"), way


def test_a_refusal_names_value_reason_and_what_works():
    (line,) = options.problems({"moe_zero_memory": "level1"})
    assert str(line) == "moe_zero_memory='level1': its expert layer recomputes with products of its own; 'disable' or None would work"
    assert options.problems({"use_flash_attn": True, "hccl_group_buffer": "dp:200"}) == []
    # The first source is quoted; the second is looked at as well.
    assert len(options.problems({"tp_2d": True}, {"tp_2d": True, "use_ascend_mc2": True})) == 2

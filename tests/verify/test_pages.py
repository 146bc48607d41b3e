"""The guide has a section for every cause that a diagnosis can name, and names no other; the skill names only causes and commands that exist."""

import re
from pathlib import Path

from tio_megatron.cli import app
from tio_megatron.verify.diagnosis.cures import CURES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "divergence.md").read_text()
ALIASES = {"visible"}
"""Becomes mask or packing."""


def test_every_cause_has_a_section():
    sections = set(re.findall(r"^### (\S+)$", PAGE, re.MULTILINE))
    assert sections == CURES.keys() - ALIASES


def test_files_that_the_guide_names_are_there():
    for name in re.findall(r"`((?:contract|kernels|layers|collectives|integrations|checkpoint)/[\w/.]+)`", PAGE):
        assert (ROOT / "tio_megatron" / name).exists(), name
    for name in re.findall(r"\]\((\w+\.md)", PAGE):
        assert (ROOT / "docs" / name).exists(), name


def test_the_table_is_that_of_a_run():
    rows = re.findall(r"^\| (\d+) \| .* \| (\d+) of (\d+) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 23))


def test_the_skill_names_what_exists():
    skill = (ROOT / "docs" / "skills" / "tio-diagnose" / "SKILL.md").read_text()
    assert skill.startswith("---\nname: tio-diagnose\ndescription: ")
    commands = {command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`tio (\w+)", skill)) <= commands
    for cell in re.findall(r"^\| .* \| (`.*`) \|$", skill, re.MULTILINE):
        assert set(re.findall(r"`([\w-]+)`", cell)) <= CURES.keys()


def test_every_cause_says_what_is_seen_by_itself():
    """Readers jump to a section: none may lean on the one above it."""
    seen = re.findall(r"^- You see: (.*)$", PAGE, re.MULTILINE)
    assert len(seen) == len(CURES.keys() - ALIASES) == len(set(seen)) and all(len(line.split()) >= 5 and not line.startswith("The same") for line in seen)

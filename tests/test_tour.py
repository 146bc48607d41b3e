"""Every name in docs/tour.md is where the page says it is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"`((?:tio_megatron|collectives)/[\w/]+(?:\.py)?)(?::(\w+))?`")


def missing(page: str) -> list[str]:
    """Files that are not there, and names that their file does not define."""
    found = []
    for file, name in NAME.findall(page):
        path = ROOT / file
        if not path.exists():
            found.append(file)
        elif name and name not in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}:
            found.append(f"{file}:{name}")
    return found


def test_the_tours_names_are_there():
    page = (ROOT / "docs" / "tour.md").read_text()
    assert len(NAME.findall(page)) > 40 and not missing(page)


def test_a_name_that_is_gone_is_seen():
    """Negative control."""
    assert missing("`tio_megatron/contract/tree.py:Gone` `collectives/gone.py`") == ["tio_megatron/contract/tree.py:Gone", "collectives/gone.py"]

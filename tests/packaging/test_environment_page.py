"""docs/environment.md names every variable that the code reads, and no other of ours."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"TIO_[A-Z0-9_]+")


def read_by_code() -> set[str]:
    """Our variables that stand as whole strings in Python, or are used by the Makefile and the launch scripts."""
    found: set[str] = set()
    for room in ("tio_megatron", "collectives", "examples", "benchmarks"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS.fullmatch(node.value):
                    found.add(node.value)
    for path in (ROOT / "Makefile", *(ROOT / "launch").glob("*.sh")):
        found.update(OURS.findall(path.read_text()))
    return found


def test_the_page_and_the_code_name_the_same_variables() -> None:
    rows = set(re.findall(r"^\| `(TIO_[A-Z0-9_]+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE))
    code = read_by_code()
    assert {"TIO_CONTRACT", "TIO_WHEEL_CACHE"} <= code
    assert code - rows == set(), "read by the code, missing in docs/environment.md"
    assert rows - code == set(), "in docs/environment.md, read nowhere"

"""Runs a notebook's cells as Python, one after the other in one namespace, and keeps what they print. Jupyter is not needed.

``python tests/support/notebooks.py examples/tour.ipynb`` runs it and writes the outputs into the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The notebook as it is on disk."""
    return json.loads(path.read_text(encoding="utf-8"))


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Its cells of code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """What a cell is said to print."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run(notebook: dict[str, Any]) -> list[str]:
    """What each cell of code prints now. An error in a cell is an error here."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for cell in code(notebook):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile("".join(cell["source"]), "<cell>", "exec"), namespace)
        found.append(said.getvalue())
    return found


def write(path: Path) -> None:
    """Run it and put the outputs into the file."""
    notebook = read(path)
    for number, (cell, text) in enumerate(zip(code(notebook), run(notebook), strict=True), 1):
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

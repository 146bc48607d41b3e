"""What mkdocs is told beyond mkdocs.yml: the README is the first page, and links that leave ``docs/`` lead to the files' names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the README as index.md."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point links at the site's pages; a link to a file of the repository that is no page becomes its name.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """
    here = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"

    def moved(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        place = (here / target).resolve()
        if not place.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: the link {match[2]!r} leads nowhere")
        anchor = f"#{anchor}" if anchor else ""
        if place == ROOT / "README.md":
            return f"[{match[1]}](index.md{anchor})"
        if place.suffix == ".md" and place.parent == ROOT / "docs":
            return f"[{match[1]}]({place.name}{anchor})"
        return f"{match[1]} (`{place.relative_to(ROOT)}`)"

    return _LINK.sub(moved, markdown)

"""The pages hold together: every link leads somewhere, the site lists every page, the API reference names what is there, one version."""

import re
from pathlib import Path

import pytest
import yaml

import tio_megatron

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names that a page's headings get."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def broken(text: str, here: Path) -> list[str]:
    """Links that lead nowhere; code is no link."""
    found = []
    for link in LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)):
        target, _, anchor = link.partition("#")
        place = (here.parent / target).resolve() if target else here
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert not broken(page.read_text(encoding="utf-8"), page)


def test_a_broken_link_is_seen():
    text = "[a](nowhere.md) [b](README.md#no-such-part) [c](README.md) `[d](gone.md)`"
    assert broken(text, ROOT / "README.md") == ["nowhere.md", "README.md#no-such-part"]


def test_the_site_lists_every_page():
    def files(nav):
        for entry in nav:
            for value in entry.values():
                yield from files(value) if isinstance(value, list) else [value]

    listed = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(["index.md", *(page.name for page in (ROOT / "docs").glob("*.md"))])


def test_the_reference_names_what_is_there():
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert len(named) > 20
    for name in named:
        path = ROOT.joinpath(*name.split("."))
        parent = path.parent.with_suffix(".py")
        inside = parent.is_file() and f"class {path.name}" in parent.read_text()
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file() or inside, name


def test_one_version():
    assert f"version: {tio_megatron.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(tio_megatron.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

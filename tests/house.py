"""``make house``: lines by room, modules that import each other, and files outside ``models/`` that name an architecture or a checkpoint's tensor."""

from __future__ import annotations

import subprocess
from collections import Counter

from tests.models.test_named_once import names_of_models
from tests.test_rooms import ROOT, circles, dotted, imported, modules

TOTALS = {"tio_megatron + collectives": ("tio_megatron", "collectives"), "examples": ("examples",), "tests": ("tests",)}


def main() -> None:
    """Print the figures of the last commit's files."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.cpp", "*.h"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    lines: Counter[str] = Counter()
    for name in listed:
        parts = name.split("/")
        room = "/".join(parts[:2]) if parts[0] == "tio_megatron" and len(parts) > 2 else parts[0]
        lines[room] += (ROOT / name).read_text(encoding="utf-8").count("\n")
    for room, count in lines.most_common():
        print(f"{count:7} {room}")
    for title, rooms in TOTALS.items():
        print(f"{sum(count for room, count in lines.items() if room.split('/')[0] in rooms):7} in all: {title}")
    found = circles(imported({dotted(path): path for path in modules()}))
    print(f"{len(found):7} import circles {found or ''}")
    named = names_of_models()
    print(f"{len(named):7} files outside models/ that name an architecture or a checkpoint's tensor {named or ''}")


if __name__ == "__main__":
    main()

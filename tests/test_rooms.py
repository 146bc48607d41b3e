"""The house holds its shape: imports run down, each room says what it is, files stay readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "findings": set(),
    "files": {"findings"},
    "contract": {"findings", "files"},
    "kernels": {"findings", "contract"},
    "collectives": {"findings", "contract"},
    "models": {"findings", "contract"},
    "checkpoint": {"findings", "files", "contract", "models"},
    "layers": {"findings", "contract", "kernels", "collectives"},
    "rl": {"findings", "contract", "kernels", "collectives", "layers"},
    "rollouts": {"findings", "files", "contract", "checkpoint"},
    "jobs": {"findings", "files", "contract", "collectives"},
    "traces": {"findings", "files", "contract", "models"},
    "integrations": {"findings", "files", "contract", "models", "kernels", "collectives", "checkpoint", "layers", "rl", "jobs", "traces"},
    "verify": {
        *("findings", "files", "contract", "models", "kernels", "collectives", "checkpoint", "layers", "rl", "rollouts", "traces", "integrations"),
    },
    "commands": {"findings", "files", "contract", "models", "checkpoint", "rollouts", "traces", "integrations", "verify"},
    "testing": {"findings", "contract", "checkpoint"},
}
"""What each room may import besides itself. ``verify`` and ``testing`` stand beside the house and are in nobody's list."""

ENGINES = {"megatron", "vllm", "deepspeed", "mindspeed", "verl", "apex", "transformer_engine", "torch_npu"}
"""Only ``integrations`` may name somebody else's symbol."""

FACE = "the face"
"""Modules beside the rooms (``__init__``, ``auto``, ``cli``): what people import, so they may reach everything but ``testing``."""


def modules() -> list[Path]:
    """The package's own modules, ``collectives`` once, by its real place."""
    found = [path for path in (ROOT / "tio_megatron").rglob("*.py") if "collectives" not in path.relative_to(ROOT / "tio_megatron").parts[:1]]
    return sorted({*found, *(ROOT / "collectives").rglob("*.py")})


def everywhere() -> list[Path]:
    """Every Python file that is ours."""
    folders = ("tio_megatron", "collectives", "examples", "benchmarks", "tests", "launch")
    return sorted({path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")})


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "collectives":
        return "collectives"
    return parts[1] if len(parts) > 2 else FACE


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all imports, those inside functions included; relative ones are refused elsewhere."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    names = {name.split(".")[1] for name in imports(path) if name.startswith("tio_megatron.")}
    return {name for name in names if name in MAY_IMPORT}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_room_is_known():
    assert {room(path) for path in modules()} - {FACE} <= set(MAY_IMPORT), "a new room needs a row in MAY_IMPORT"


@pytest.mark.parametrize("where", sorted(MAY_IMPORT))
def test_imports_run_down(where):
    wrong = [f"{name(path)} imports {other}" for path in modules() if room(path) == where for other in rooms_imported(path) - MAY_IMPORT[where] - {where}]
    assert not wrong, f"{where} may import {sorted(MAY_IMPORT[where]) or 'no other room'}: {wrong}"


def test_nobody_imports_testing_or_the_examples():
    wrong = [name(path) for path in modules() if room(path) != "testing" and "testing" in rooms_imported(path)]
    wrong += [name(path) for path in modules() if any(i.split(".")[0] in ("examples", "benchmarks", "tests", "collectives") for i in imports(path))]
    assert not wrong


def test_only_integrations_names_engines():
    wrong = [f"{name(path)}: {i}" for path in modules() if room(path) != "integrations" for i in imports(path) if i.split(".")[0] in ENGINES]
    assert not wrong


def test_the_contract_is_pure_python():
    wrong = [f"{name(path)}: {i}" for path in modules() if room(path) == "contract" for i in imports(path) if i.split(".")[0] in ("torch", "numpy")]
    assert not wrong


def test_imports_are_absolute():
    wrong = [name(path) for path in modules() for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom) and node.level]
    assert not wrong


def test_each_room_opens_with_a_sentence():
    silent = []
    for path in modules():
        if path.name == "__init__.py":
            first = (ast.get_docstring(parsed(path)) or "").split("\n\n")[0]
            if not first[:1] or "." not in first:
                silent.append(name(path))
    assert not silent, "say in one sentence what lives here, and what never does"


def test_files_stay_readable():
    long = {name(path): n for path in everywhere() if (n := len(path.read_text().splitlines())) > 500}
    assert not long, "two ideas in one file"
    nameless = [name(path) for path in everywhere() if path.stem.strip("_") in ("util", "utils", "common", "helper", "helpers", "misc")]
    assert not nameless, "a room without a name"


def test_order_tests_compare_bytes():
    loose = ("allclose", "assert_close", "isclose")
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        if "accuracy" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(parsed(path)):
            called = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if called in loose:
                wrong.append(f"{name(path)}:{node.lineno}")
    assert not wrong, "a tolerance belongs below tests/accuracy"


def imported(known: dict[str, Path]) -> dict[str, set[str]]:
    """For each module of ``known`` (dotted name, file) those that it imports, imports inside functions and for types included."""
    found = {}
    for name, path in known.items():
        names = {longest for full in imports(path) for longest in (full, full.rpartition(".")[0]) if longest in known}
        found[name] = {one for one in names if one != name and not any(other.startswith(f"{one}.") for other in names)}
    return found


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Modules that import each other, directly or through others: the strongly connected parts of ``graph`` that have several modules."""

    def reached(start: str) -> set[str]:
        seen, ahead = set[str](), [start]
        while ahead:
            for name in graph[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        return seen

    after = {name: reached(name) for name in graph}
    return sorted({tuple(sorted({name, *(other for other in after[name] if name in after[other])})) for name in graph if name in after[name]})


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "tio_megatron" else ("tio_megatron", *parts))


def test_no_modules_import_each_other():
    assert not circles(imported({dotted(path): path for path in modules()}))


def test_a_circle_is_seen(tmp_path):
    """Negative control: a circle of three, one of its imports inside a function."""
    texts = {"p.a": "from p import b\n", "p.b": "import p.c\n", "p.c": "def f():\n    from p.a import x\n", "p.d": "from p import a\n"}
    known = {name: tmp_path / f"{name}.py" for name in texts}
    for name, text in texts.items():
        known[name].write_text(text)
    assert circles(imported(known)) == [("p.a", "p.b", "p.c")]


def test_this_test_can_fail(tmp_path):
    """Negative control: the reader sees imports inside functions, with and without a name."""
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from tio_megatron import verify\n    import tio_megatron.testing as t\n    from tio_megatron.layers.vocab import x\n")
    assert rooms_imported(bad) == {"verify", "testing", "layers"}

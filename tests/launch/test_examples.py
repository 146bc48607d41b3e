"""Every command that the help and the documents show for the launch scripts is one that they accept, and every example of ``tio``'s help too."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer

from examples.qwen3_moe import npu_recipe
from tio_megatron.cli import app

ROOT = Path(__file__).resolve().parents[2]
JOBS = {"": "options", "rl": "rl", "consistency": "consistency"}
DOCUMENTS = ["README.md", "examples/qwen3_moe/README.md", "launch/qwen3_moe.sh", "launch/qwen3_moe.slurm", "launch/qwen3_moe_30b_npu.sh"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:bash|torchrun|sbatch) (?:.* )?launch/qwen3_moe(?:_30b_npu)?\.(?:sh|slurm)(?: .*)?")


def commands(text: str) -> list[str]:
    """Commands that stand alone on a line, or behind a comment's ``#``, without the explanation that follows after two blanks or more."""
    lines = (line.strip().removeprefix("#").strip() for line in text.splitlines())
    return [re.split(r"\s{2,}", line)[0] for line in lines if COMMAND.fullmatch(line)]


def shown() -> dict[str, str]:
    """Where each command is shown first, by the command."""
    found: dict[str, str] = {}
    for job, name in JOBS.items():
        for command in commands(import_module(f"examples.qwen3_moe.{name}").parser().format_help()):
            found.setdefault(command, f"{job} --help".strip())
    for document in DOCUMENTS:
        for command in commands((ROOT / document).read_text(encoding="utf-8")):
            found.setdefault(command, document)
    return found


def accepts(command: str, folder: Path) -> None:
    """Parse a command as its launch script and torchrun do, and start nothing. What it reads of the user's is in ``folder``."""
    (folder / "my.jsonl").touch()
    command = re.sub(r"(--model|--prompts) \S+", lambda found: f"{found[1]} {folder if found[1] == '--model' else folder / 'my.jsonl'}", command)
    words = shlex.split(command.replace("=...", "=1"), comments=True)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = words[len(variables) :]
    script = next(number for number, word in enumerate(words) if word.startswith("launch/"))
    given, launcher = words[script + 1 :], dict(zip(words[:script], words[1:script], strict=False))
    if "npu" in words[script]:
        npu_recipe.parser().parse_args(given)
        return
    job = given[0] if given and given[0] in JOBS else ""
    parse = import_module(f"examples.qwen3_moe.{JOBS[job]}").parse
    try:
        options = parse(given[bool(job) :])
        nodes = int(launcher.get("--nnodes", launcher.get("--nodes", variables.get("NNODES", "1"))))
        ranks = int(launcher.get("--nproc-per-node", "1")) * nodes if words[0] == "torchrun" else options.trainer.ranks
        assert ranks % nodes == 0, f"{ranks} ranks over {nodes} hosts"
        parse(given[bool(job) :], ranks)
    except SystemExit as left:
        assert left.code == 0 and given[-1] == "--help"


@pytest.mark.parametrize("command, place", [pytest.param(command, place, id=f"{place}: {command}") for command, place in shown().items()])
def test_a_command_that_is_shown_is_accepted(tmp_path, command, place):
    accepts(command, tmp_path)


def test_every_help_and_document_was_read():
    found = list(shown().values())
    assert {f"{job} --help".strip() for job in JOBS} | {"README.md", "docs/multinode.md", "docs/ascend.md", "launch/qwen3_moe_30b_npu.sh"} <= set(found)
    assert len(found) >= 40


@pytest.mark.parametrize("command", ["bash launch/qwen3_moe.sh consistency --layouts cp2+ep2 dp4", "torchrun launch/qwen3_moe.sh --tp 2"])
def test_a_command_that_is_refused_is_noticed(tmp_path, command):
    with pytest.raises(ValueError, match="ranks"):
        accepts(command, tmp_path)


def examples_of_tio() -> list[str]:
    """What follows "Example: " in the help of each of ``tio``'s commands, groups' too."""
    found: list[str] = []

    def walk(command, way):
        for name, below in getattr(command, "commands", {}).items():
            walk(below, f"{way} {name}")
        if not hasattr(command, "commands"):
            found.append(f"{way}: {command.epilog}")

    walk(typer.main.get_command(app), "tio")
    return found


@pytest.mark.parametrize("shown", examples_of_tio())
def test_an_example_of_tio_is_accepted(shown):
    way, _, example = shown.partition(": ")
    words = shlex.split(example.removeprefix("Example: "))
    assert words[: len(way.split())] == way.split()
    command, context = typer.main.get_command(app), None
    for word in way.split()[1:]:
        context = command.context_class(command, info_name=word, parent=context)
        command = command.get_command(context, word)
    command.make_context(way, words[len(way.split()) :], parent=context)  # what it cannot parse, it raises

"""Command lines that do not fit: one JSON object where it is asked for, and no option that is left aside without a word."""

import json
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

from tio_megatron.cli import app

GROUP = typer.main.get_command(app)
COMMANDS = [(name,) for name in GROUP.commands if name != "rollouts"] + [("rollouts", name) for name in GROUP.commands["rollouts"].commands]


def tio(*arguments):
    """(exit status, stdout, stderr) of a run in this process."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def refused(*arguments):
    """The error of a command line that has ``--json``."""
    status, said, aside = tio(*arguments, "--json")
    answer = json.loads(said)
    assert (status, answer["status"], aside) == (2, 2, "") and set(answer) == {"status", "error"}, (arguments, said, aside)
    return answer["error"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_subcommand_refuses_in_json(command):
    assert "No such option: --nonsense" in refused(*command, "--nonsense") or command == ("doctor",)
    needed = [each for each in GROUP.commands[command[0]].params if each.required] if len(command) == 1 else [command]
    if needed:
        assert "Missing" in refused(*command)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nosuch", "No such command 'nosuch'"),
        ("rollouts nosuch", "No such command 'nosuch'"),
        ("record M T --tokens F --engine jax", "'jax' is not one of"),
        ("record M T --tokens F --temperature 0", "--temperature"),
        ("record M T --tokens F --limit 0", "--limit"),
        ("record M T --tokens F --batch many", "--batch"),
        ("logdiff a", "Missing argument 'B'"),
        ("logdiff a b c", "unexpected extra argument"),
    ],
)
def test_usage_in_json(line, said):
    assert said in refused(*line.split())


def test_without_json_it_is_text_and_behind_two_dashes_it_is_a_name():
    status, said, aside = tio("nosuch")
    assert (status, said) == (2, "") and "No such command" in aside
    status, said, aside = tio("logdiff", "a", "b", "--", "--json")
    assert (status, said) == (2, "") and "unexpected extra argument" in aside


def test_the_command_itself_does_so():
    done = subprocess.run([sys.executable, "-m", "tio_megatron", "nosuch", "--json"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "") and json.loads(done.stdout)["status"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--engine hf --layout tp2", "--layout: --engine hf runs the whole model"),
        ("--engine hf --stock", "--stock: --engine hf"),
        ("--tp 2 --ep 2 --sp", "--tp, --ep, --sp: --engine hf"),
        ("--engine megatron --batch 4", "--batch 4: --engine megatron is given one sequence a pass"),
        ("--engine vllm --batch 4", "--batch 4: --engine vllm"),
        ("--engine megatron --dtype float32", "--dtype float32"),
        ("--engine megatron --sp", "--tp 2 or more"),
        ("--engine megatron --layout tp2 --tp 4", "both say how the model is cut"),
        ("--engine vllm --layout tp2+ep --ep 2", "both say how the model is cut"),
        ("--engine vllm --sp", "no sequence parallelism"),
        ("--engine vllm --tp 2 --ep 4", "1 or 2 would work"),
        ("--engine vllm --temperature 0.7", "scores prompts without a temperature"),
    ],
)
def test_record_refuses_what_its_engine_would_not_look_at(options, said):
    assert said in refused("record", "M", "T", "--tokens", "F", *options.split())


@pytest.mark.parametrize(
    "options", ["--engine hf --batch 3 --dtype float32", "--engine megatron --layout tp1", "--engine vllm --tp 2 --ep 2 --dtype float32 --stock"]
)
def test_record_takes_what_its_engine_has(options):
    assert refused("record", "M", "T", "--tokens", "F", *options.split()) == "F: no such file"

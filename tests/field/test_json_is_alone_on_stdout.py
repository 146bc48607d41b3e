"""With ``--json`` stdout holds one JSON object, whatever else prints while the command works; for every command of ``tio``."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import typer

from tio_megatron import cli
from tio_megatron.commands import answer
from tio_megatron.testing.qwen3 import write_tiny

ARGUMENTS = {
    "logdiff": ["a.jsonl", "b.jsonl"],
    "record": ["model", "a.trace", "--tokens", "a.jsonl"],
    "diagnose": ["a.trace", "b.trace"],
    "doctor": [],
    "plan": ["--model", "Qwen3-30B-A3B", "--trainer", "tp2", "--rollout", "tp1"],
    "matrix": ["layouts.yaml"],
    "rollouts show": ["store"],
    "rollouts verify": ["store"],
    "rollouts import": ["dump", "store"],
    "rollouts sample": ["store", "--count", "1", "--seed", "1"],
    "rollouts replay": ["store", "model"],
}
"""Of each command, such as end in an answer without a model or an engine; an error is an answer."""


def commands(group, before=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def test_every_command_is_tried():
    assert set(commands(typer.main.get_command(cli.app))) == set(ARGUMENTS)


def test_of_several_ranks_one_answers(tmp_path):
    model = write_tiny(tmp_path / "model", num_hidden_layers=1, hidden_size=64, vocab_size=100, num_attention_heads=4, num_key_value_heads=2)
    (tmp_path / "t.jsonl").write_text("[1, 2, 3]\n")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tio_megatron", "record", str(model)]
    words = [str(tmp_path / "trace"), "--engine", "megatron", "--layout", "tp2", "--tokens", str(tmp_path / "t.jsonl"), "--json"]
    done = subprocess.run([*start, *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, json.loads(done.stdout)["tokens"]) == (0, 3), done.stderr[-2000:]


@contextlib.contextmanager
def noisy():
    print("printed")
    os.write(1, b"written by a library\n")
    yield


@pytest.mark.parametrize("name", ARGUMENTS)
def test_stdout_is_one_object(name, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answer, "other_packages_quiet", noisy)
    with pytest.raises(SystemExit) as left:
        cli.app([*name.split(), *ARGUMENTS[name], "--json"], prog_name="tio")
    out, err = capfd.readouterr()
    assert json.loads(out)["status"] == left.value.code, out
    assert "printed" in err and "written by a library" in err

"""The command ``tio``: exit status, JSON, help with an example, and no engine imported to compare."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.traces import Tracer, TraceWriter

COMMANDS = [command.callback.__name__ for command in app.registered_commands]


def tio(*arguments):
    """(exit status, stdout) of a run in this process."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def recordings(tmp_path):
    """Two that are equal and one that is not."""
    for name, value in (("a", -1.0), ("same", -1.0), ("b", -1.5)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"tokens": [1, 2], "logprobs": [value]}) + "\n")
    return tmp_path


def test_status_is_0_equal_1_differs_2_could_not_tell(recordings):
    a, b, same = (recordings / f"{name}.jsonl" for name in ("a", "b", "same"))
    assert tio("logdiff", a, same)[0] == 0
    assert tio("logdiff", a, b)[0] == 1
    (recordings / "none.jsonl").write_text('{"tokens": [1], "logprobs": [null]}\n')
    assert tio("logdiff", recordings / "none.jsonl", recordings / "none.jsonl")[0] == 2
    status, said = tio("logdiff", a, recordings / "gone.jsonl")
    assert status == 2 and said.strip().endswith("gone.jsonl: no such file") and len(said.strip().splitlines()) == 1


def test_json_for_machines(recordings):
    a, b = recordings / "a.jsonl", recordings / "b.jsonl"
    status, said = tio("logdiff", a, b, "--json")
    answer = json.loads(said)
    assert (status, answer["status"], answer["tokens"], answer["nonzero"], answer["max_abs"]) == (1, 1, 1, 1, 0.5)
    status, said = tio("logdiff", a, recordings / "gone.jsonl", "--json")
    assert status == 2 and json.loads(said) == {"status": 2, "error": f"{recordings / 'gone.jsonl'}: no such file"}


def test_plot_and_page(recordings):
    tio("logdiff", recordings / "a.jsonl", recordings / "b.jsonl", "--png", recordings / "x.png", "--html", recordings / "deep" / "x.html")
    assert (recordings / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = (recordings / "deep" / "x.html").read_text()
    assert "data:image/png;base64," in page and "differs: 1 of 1 tokens" in page
    assert "http" not in page, "the page must need nothing from outside"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_and_json(name):
    status, said = tio(name, "--help")
    assert status == 0 and f"Example: tio {name} " in said and "--json" in said


BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron", "vllm", "transformers"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Refuse())
from tio_megatron.cli import main
sys.argv = ["tio", *sys.argv[1:]]
main()
"""


def test_no_engine_is_needed_to_compare(recordings):
    command = [sys.executable, "-c", BLOCKED, "logdiff", str(recordings / "a.jsonl"), str(recordings / "b.jsonl"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and json.loads(done.stdout)["nonzero"] == 1, done.stderr


def test_no_engine_is_needed_to_diagnose(tmp_path):
    for name, value in (("a", 1.0), ("b", 1.5)):
        with TraceWriter(tmp_path / name, [[1, 2]], engine="mine", shape={"layers": 1, "moe": [False]}, keep=True) as writer, Tracer(writer).rows([(0, 0, 2)]):
            writer.put("embed", torch.tensor([[2.0], [3.0]]), torch.arange(2))
            writer.put("layers.0.attn_norm", torch.tensor([[0.5], [value]]), torch.arange(2))
    command = [sys.executable, "-c", BLOCKED, "diagnose", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert done.returncode == 2 and (answer["point"], answer["rows"], answer["first"]) == ("layers.0.attn_norm", 1, [0, 1]), done.stderr


def test_python_m_is_the_same():
    done = subprocess.run([sys.executable, "-m", "tio_megatron", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("tio_megatron 0.")

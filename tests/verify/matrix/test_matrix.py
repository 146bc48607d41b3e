"""A table run with real engines, and its page in a real browser."""

import html
import json
import shutil
import subprocess
import warnings

import pytest
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.testing.qwen3 import MOE, write_tiny
from tio_megatron.verify.logdiff import Logdiff
from tio_megatron.verify.matrix import heat
from tio_megatron.verify.matrix.run import Cell
from tio_megatron.verify.matrix.table import Side


def cell(trainer, rollout, max_abs):
    found = Logdiff(sequences=1, tokens=10, nonzero=3 if max_abs else 0, max_abs=max_abs, mean_abs=max_abs / 4)
    return Cell(Side.parse(trainer), Side.parse(rollout), found, f"tio logdiff {trainer} <&> {rollout}")


CELLS = [cell(a, b, x) for (a, b), x in zip([(a, b) for a in ("megatron", "stock megatron tp2") for b in ("vllm", "hf")], (0.0, 0.5, 2e-4, 0.25), strict=True)]


def test_the_last_line_and_the_colours():
    assert heat.summary(CELLS) == "logdiff 0 in 1 of 4 pairs (40 tokens); max 0.5"
    assert heat.summary(CELLS[:1]) == "logdiff 0 in 1 of 1 pairs (10 tokens)"
    assert len({heat._colour(one) for one in CELLS}) == 4


def browser():
    return next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None)


def test_the_page_in_a_browser(tmp_path):
    """Headless Chromium runs the page's script: the first pair's numbers and its command stand there as text, not as markup."""
    if browser() is None:
        warnings.warn("no Chromium here: the page of tio matrix was NOT opened in a browser (apt-get install chromium)", stacklevel=1)
        pytest.skip("no Chromium: the page was NOT opened in a browser")
    (tmp_path / "matrix.html").write_text(heat.page(CELLS))
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"file://{tmp_path / 'matrix.html'}",
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert dom.count('class="cell') == 4 and 'class="cell chosen"' in dom
    assert "that differ: 0" in dom and html.escape("tio logdiff megatron <&> vllm") in dom
    assert "http" not in heat.page(CELLS), "nothing is fetched"


def run(tmp_path, sides):
    write_tiny(tmp_path / "model", MOE)
    (tmp_path / "t.yaml").write_text(f"model: model\ntokens: {{random: 3, longest: 80}}\n{sides}")
    done = CliRunner().invoke(app, ["matrix", str(tmp_path / "t.yaml"), "--out", str(tmp_path / "out"), "--json"])
    return done.exit_code, json.loads(done.output)


def test_layouts_of_a_real_engine(tmp_path):
    status, answer = run(tmp_path, "trainers: [megatron tp1, stock megatron tp2+ep2]\nrollouts: [megatron tp2+ep2]\n")
    found = {pair["trainer"]: pair for pair in answer["pairs"]}
    assert status == 1 and found["megatron tp1"]["nonzero"] == 0 and found["stock megatron tp2+ep2"]["nonzero"] > 0
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir() if path.name.startswith(("report", "matrix"))) == [".html", ".json", ".png"]
    again = found["megatron tp1"]["command"].split()[1:]
    assert CliRunner().invoke(app, again).exit_code == 0, "the command repeats the pair"


def test_an_engine_that_fails_is_said_with_its_log(tmp_path):
    write_tiny(tmp_path / "model", MOE)
    next((tmp_path / "model").glob("*.safetensors")).write_bytes(b"broken")
    (tmp_path / "t.yaml").write_text("model: model\ntokens: {random: 1}\ntrainers: [megatron]\nrollouts: [megatron]\n")
    done = CliRunner().invoke(app, ["matrix", str(tmp_path / "t.yaml"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "megatron tp1: ended with status 1" in done.output and "megatron-tp1.log" in done.output
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.full
def test_trainer_and_rollout(tmp_path):
    status, answer = run(tmp_path, "trainers: [megatron tp2+ep2]\nrollouts: [vllm tp1, vllm tp2+ep, stock vllm tp1, hf float32]\n")
    assert status == 1 and [pair["nonzero"] > 0 for pair in answer["pairs"]] == [False, False, True, True]

"""The job's parts, each alone: layouts, tokenizer, batches, made checkpoints, children, report."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.qwen3_moe import corpus, makers, prompts, report, stages
from examples.qwen3_moe.job import policy_weights
from examples.qwen3_moe.options import parse
from examples.qwen3_moe.trainer import scoring_batches
from tio_megatron.checkpoint import CheckpointConfig, tensor_digest, tensor_table
from tio_megatron.contract import Contract
from tio_megatron.contract.words import RolloutLayout, TrainerLayout
from tio_megatron.jobs import folders
from tio_megatron.jobs.children import Child, ChildFailed
from tio_megatron.jobs.problems import InputProblem
from tio_megatron.verify import Comparison

ROOT = Path(__file__).resolve().parents[2]


def test_layouts_in_words():
    for text, ranks, shown in (
        ("tp1", 1, "TP 1"),
        ("tp2+ep2", 2, "TP 2 EP 2 ETP 1 SP"),
        ("ep2+allgather", 2, "TP 1 EP 2 DP 2 allgather"),
        ("pp2+ep2", 4, "TP 1 EP 2 PP 2 DP 2"),
        ("tp4+ep2+etp2", 4, "TP 4 EP 2 ETP 2 SP"),
        ("tp4,ep4", 4, "TP 4 EP 4 ETP 1 SP"),
    ):
        layout = TrainerLayout.parse(text)
        assert (layout.ranks, str(layout)) == (ranks, shown)
        assert TrainerLayout.parse(layout.words) == layout
    assert RolloutLayout.parse("tp2+ep2") == RolloutLayout.parse("tp2+ep") == RolloutLayout(2, True)


def test_options_of_megatron_have_its_names():
    short = parse(["--tp", "2", "--ep", "2", "--etp", "1", "--pp", "2", "--sp"])
    long = parse(
        ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
        + ["--pipeline-model-parallel-size", "2", "--sequence-parallel"]
    )
    assert short == long and short.trainer.ranks == 4
    assert parse(["--ep", "2"], world=4).trainer.layout.dp == 4
    with pytest.raises(ValueError, match="3 ranks do not divide by tp 2 times pp 1 times cp 1; start 2"):
        parse(["--tp", "2"], world=3)


def test_layouts_of_the_table_add_up():
    apart = parse(["--trainers", "tp1", "--trainers", "ep2", "tp2", "--rollouts", "tp2", "--rollouts", "tp1"])
    assert apart == parse(["--trainers", "tp1", "ep2", "tp2", "--rollouts", "tp2", "tp1"])
    assert len(apart.trainers) == 3 and apart.rollouts == (RolloutLayout(2), RolloutLayout(1))
    assert len(parse([]).trainers) == 4, "what is said replaces the default, and does not stay behind in it"


def test_help_shows_every_option():
    shown = subprocess.run([sys.executable, str(ROOT / "launch" / "qwen3_moe.sh"), "--help"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    for word in ("--tensor-model-parallel-size", "--tp", "--model", "--quick", "examples:", "exit status", "--moe-token-dispatcher-type", "--rollouts"):
        assert word in shown


def test_the_tokenizer_is_the_same_every_time():
    texts = corpus.corpus()
    first, second = (corpus.train_tokenizer(texts[:40], 1024) for _ in range(2))
    assert first.to_str() == second.to_str()
    text = "def naïve(x: int) -> str:\n\treturn '☃'  # snow\n"
    assert first.decode(first.encode(text).ids) == text
    stream = corpus.encode(first, texts[:3])
    assert stream.dtype == np.int32 and (stream == first.token_to_id(corpus.END)).sum() == 3 and stream.max() < 1024
    assert corpus.corpus_key(["a", "b"]) != corpus.corpus_key(["ab"])


def test_requests_do_not_depend_on_the_layout():
    asked = prompts.from_stream(range(5000), prompts.LENGTHS, 1)
    assert [len(p) for p in asked] == list(prompts.LENGTHS) and asked == prompts.from_stream(range(5000), prompts.LENGTHS, 1)
    made = prompts.requests(asked, max_new_tokens=8, temperature=0.8, seed=1, round_number=0)
    later = prompts.requests(asked, max_new_tokens=8, temperature=0.8, seed=1, round_number=1)
    seeds = [request.seed for request in made + later if request.temperature]
    assert len(set(seeds)) == len(seeds) == 2 * len(asked)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_takes_equal_steps(ranks):
    sequences = [list(range(n)) for n in (5, 2, 9, 3, 7)]
    found = [scoring_batches(sequences, ranks=ranks, rank=rank, size=2, multiple=4) for rank in range(ranks)]
    assert len({len(theirs) for theirs in found}) == 1
    for same_step in zip(*found, strict=True):
        assert len({batch.tokens.shape for batch in same_step}) == 1
    index = sorted(i for theirs in found for batch in theirs for i in batch.index if i >= 0)
    assert index == [0, 1, 2, 3, 4]
    for batch in found[0]:
        for row, (number, length) in enumerate(zip(batch.index, batch.lengths, strict=True)):
            if number >= 0:
                assert batch.tokens[row, :length].tolist() == sequences[number]
                assert batch.labels[row, : length - 1].tolist() == sequences[number][1:]


def test_weights_of_the_step_come_from_the_whole_batch():
    weights = policy_weights([[1, 2, 3, 4], [1, 2, 2, 2]], [2, 1])
    assert weights[0][0] == 0.0 and len(weights[0]) == 3 and weights[0][1] > weights[1][0]
    assert policy_weights([[1, 2, 3], [1, 2, 3]], [1, 1])[0] == pytest.approx([0.1 / 4] * 2)


def test_made_checkpoints():
    tiny, full = (CheckpointConfig.from_dict(raw) for raw in (makers.tiny_config(), makers.slice_config(2)))
    assert (tiny.shape.layers, tiny.shape.hidden, tiny.shape.experts, tiny.shape.top_k, tiny.shape.head_dim) == (4, 256, 16, 4, 64)
    assert (full.shape.hidden, full.shape.heads, full.shape.kv_heads, full.shape.head_dim, full.shape.moe_ffn) == (2048, 32, 4, 128, 768)
    assert (full.shape.experts, full.shape.top_k, full.shape.vocab, full.shape.layers) == (128, 8, 151936, 2)
    for config in (tiny, full):
        Contract().check(TrainerLayout.parse("tp4+ep4").layout, config.shape)
    one = CheckpointConfig.from_dict(makers.tiny_config(1))
    first, again = (dict(makers.random_tensors(one, 1)) for _ in range(2))
    assert list(first) == list(tensor_table(one.shape))
    assert all(tensor_digest(first[name]) == tensor_digest(again[name]) for name in first)
    assert all(torch.isfinite(tensor).all() for tensor in first.values())


CHILD = """
import subprocess, sys, os, time
from tio_megatron.jobs.children import report, serve
from tio_megatron.jobs.problems import InputProblem
def echo(word): print("noise on stdout"); report(1, 2); return {"word": word, "rank": os.environ.get("RANK"), "extra": os.environ.get("EXTRA")}
def bad(): raise InputProblem("mend this")
def bug(): raise KeyError("a bug")
def die(): print("last words", file=sys.stderr, flush=True); os._exit(7)
def spawn(): return {"pid": subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid}
def hang(): time.sleep(600)
serve({"echo": echo, "bad": bad, "bug": bug, "die": die, "spawn": spawn, "hang": hang})
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "childish.py").write_text(CHILD)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Child("a child", "childish", tmp_path / "logs", {"EXTRA": "yes"}) as made:
        yield made


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


def test_a_child_answers_and_reports(child):
    seen = []
    assert child.ask("echo", seen.append, word="hi") == {"word": "hi", "rank": None, "extra": "yes"}
    assert seen == [{"progress": 1, "total": 2, "what": ""}]
    with pytest.raises(InputProblem, match="mend this"):
        child.ask("bad")
    with pytest.raises(ChildFailed, match="a child: KeyError: 'a bug' .*a_child.log"):
        child.ask("bug")
    assert child.ask("echo", word="still there")["word"] == "still there"
    with pytest.raises(ChildFailed, match="ended with status 7 during 'die': last words"):
        child.ask("die")


def test_what_a_child_started_ends_with_it(child):
    pid = child.ask("spawn")["pid"]
    assert alive(pid)
    child.close()
    for _ in range(50):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)


def test_a_child_that_hangs_is_ended(child):
    import threading

    timer = threading.Timer(2.0, lambda: child.close(0.1))
    timer.start()
    with pytest.raises(ChildFailed, match="during 'hang'"):
        child.ask("hang")
    timer.join()


SAME = Comparison(10, 4, 0, 0.0, 10, 0, differences=np.zeros(10))
OTHER = Comparison(10, 4, 3, 0.25, 0, 0, "sequence 0, token 1: ...", np.array([0.25, 0, 1e-6, -0.1] + [0.0] * 6))


def test_the_report_is_whole(tmp_path):
    pairs, control = [report.Pair("TP 2 EP 2 ETP 1 SP", "TP 1", SAME)], [report.Pair("TP 1", "TP 1", OTHER)]
    report.write(tmp_path / "out", pairs, control, {"fingerprint": "f"})
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["summary"] == "logdiff 0 in 1 of 1 pairs (10 tokens); stock: max 0.25"
    for kind in ("pairs", "control"):
        assert {"trainer", "rollout", "tokens", "nonzero", "max_abs"} <= found[kind][0].keys()
    assert found["versions"]["torch"] and found["machine"]["cores"] and found["fingerprint"] == "f"
    assert (tmp_path / "out" / "logdiff.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logdiff.png", "report.json"]


def test_the_last_line_counts():
    wrong = Comparison(5, 5, 0, 0.0, 5, 1)
    pairs = [report.Pair("a", "b", found) for found in (SAME, wrong, SAME)]
    assert report.summary(pairs, []) == "logdiff 0 in 2 of 3 pairs (25 tokens); stock: not run"
    infinite = Comparison(1, 1, 1, float("inf"), 0, 0, differences=np.array([np.inf]))
    assert report.Pair("a", "b", infinite).to_dict()["max_abs"] == "inf"
    assert report.picture([report.Pair("a", "b", infinite)], [])


def test_the_cache_keeps_what_was_used_last(tmp_path):
    """Old checkpoints made here go, a young one that a job may read stays, and nothing else is touched."""
    made = [tmp_path / f"tiny-{number:012x}" for number in range(20)]
    others = [tmp_path / name for name in ("mine", "tiny-of-mine", "slice-123")]
    for age, folder in enumerate([*made, *others]):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        os.utime(folder, (0, 1000 - age))
    os.utime(made[19])
    folders.forget_old(tmp_path, stages.MADE, made[18])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted(path.name for path in [*made[:14], made[18], made[19], *others])
    for folder in made:
        if folder.exists():
            os.utime(folder)
    for number in range(20, 30):
        (tmp_path / f"slice-{number:012x}").mkdir()
    folders.forget_old(tmp_path, stages.MADE, made[0])
    assert len(list(tmp_path.iterdir())) == 26 + len(others), "all were used today"

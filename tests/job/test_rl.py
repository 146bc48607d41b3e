"""Reinforcement learning as a newcomer starts it: every step exactly on policy, the same run in any layout, a reward that rises."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.qwen3_moe import makers, rl, rl_loop, rl_start, tasks
from examples.qwen3_moe.rl import parse
from examples.qwen3_moe.rl_metrics import MetricsFile, measure, on_policy, picture, read
from tio_megatron.contract import Contract
from tio_megatron.contract.words import RolloutLayout
from tio_megatron.integrations.vllm.rollout import Request, Rollout
from tio_megatron.rollouts import Store
from tio_megatron.verify.monitor.event_file import EventFile, crc32c

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["step", "reward", "entropy", "logdiff_max", "logdiff_mean", "logdiff_nonzero", "kl_k1", "kl_k3", "ratio_min", "ratio_max", "tokens_per_s"]
SHORT = ("--num-layers", "1", "--pretrain-steps", "1", "--warm-steps", "16", "--prompts", "4", "--samples", "4", "--steps", "3")


def run(folder: Path, *argv: str, status: int = 0) -> str:
    """The last line of a finished job."""
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "TIO_CONTRACT", "OMP_NUM_THREADS")}
    variables |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TIO_CACHE": str(folder / "cache")}
    command = ["bash", str(ROOT / "launch" / "qwen3_moe.sh"), "rl", *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, timeout=1800)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines() if status == 0 else [line for line in done.stderr.splitlines() if line.startswith("qwen3_moe: ")]
    return lines[-1]


def decided(path: Path) -> list[dict]:
    """The steps without what the clock says."""
    return [{name: value for name, value in step.items() if name != "tokens_per_s"} for step in read(path)]


def test_three_steps(tmp_path):
    last = run(tmp_path, *SHORT, "--keep-rollouts")
    assert re.fullmatch(r"on policy in 3 of 3 steps \(logdiff 0, ratio 1\.0, KL 0\); reward \d\.\d\d to \d\.\d\d", last), last
    out = tmp_path / "out" / "rl"
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3] and all(set(NAMES) <= set(step) for step in steps)
    for step in steps:
        assert on_policy(step) and step["entropy"] > 0 and step["tokens"] >= 16 and step["tokens_per_s"] > 0
    assert len({step["weights"] for step in steps}) == 3, "a step left the weights as they were"
    kept = Store.open(out / "rollouts")
    assert kept.verify().sampled == sum(step["tokens"] for step in steps) and [about.weights for about in kept.abouts] == [step["weights"] for step in steps]
    assert (out / "rl.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list(out.glob("events.out.tfevents.*"))) == 1


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_forty_steps_learn_and_stock_is_off_policy(tmp_path):
    last = run(tmp_path)
    found = re.fullmatch(r"on policy in 40 of 40 steps \(logdiff 0, ratio 1\.0, KL 0\); reward (\d\.\d\d) to (\d\.\d\d)", last)
    assert found and float(found[2]) > float(found[1]) + 0.1 > 0.2, last
    # The control: the same loop with the packages as they are must see differences, else zero would mean nothing.
    assert run(tmp_path, "--stock", "--steps", "3").startswith("stock: on policy in 0 of 3 steps (logdiff to ")
    for step in read(tmp_path / "out" / "rl" / "stock" / "metrics.jsonl"):
        assert step["logdiff_nonzero"] > step["tokens"] / 2 and step["ratio_min"] < 1.0 < step["ratio_max"] and step["kl_k3"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        ("--tp", "1", "--ep", "1", "--rollout", "tp2"),
        ("--tp", "1", "--ep", "2", "--rollout", "tp2+ep"),
        ("--tp", "1", "--ep", "1", "--pp", "2"),
        ("--cp", "2", "--tp", "1"),
    ],
    ids=" ".join,
)
def test_the_same_run_in_any_layout(tmp_path, layout):
    both = (*SHORT, "--num-layers", "2", "--minibatches", "2", "--temperature", "0.8")
    run(tmp_path, *both, "--out", "first")
    run(tmp_path, *both, *layout, "--micro-batch-size", "3", "--out", "second")
    first = decided(tmp_path / "first" / "metrics.jsonl")
    assert len(first) == 3 and all(map(on_policy, first)) and first == decided(tmp_path / "second" / "metrics.jsonl")


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_run_that_was_stopped_goes_on_in_another_layout(tmp_path):
    run(tmp_path, *SHORT, "--out", "whole")
    run(tmp_path, *SHORT, "--steps", "2", "--save-every", "1", "--out", "parts")
    assert "settings.lr" in run(tmp_path, *SHORT, "--resume", "--lr", "0.1", "--out", "parts", status=2)
    last = run(tmp_path, *SHORT, "--resume", "--tp", "1", "--ep", "1", "--out", "parts")
    assert last.startswith("on policy in 3 of 3 steps") and decided(tmp_path / "whole" / "metrics.jsonl") == decided(tmp_path / "parts" / "metrics.jsonl")


@pytest.mark.full
def test_the_same_tokens_in_any_layout_batch_or_engine(tmp_path):
    """(seed, step, prompt, sample) decides; the control is another sample."""
    raw = makers.tiny_config(2)
    makers.make_random(tmp_path / "model", raw, 1)
    contract = Contract.for_layouts(RolloutLayout.parse("tp2").layout)

    def request(prompt: int, sample: int) -> Request:
        return Request(tuple(range(7 * prompt + 1, 8 * prompt + 12)), 12, 1.0, tasks.sampling_seed(3, 5, prompt, sample))

    asked = [request(prompt, sample) for prompt in range(4) for sample in range(3)]
    found = []
    for layout in ("tp1", "tp1", "tp2", "tp2+ep"):
        parsed = RolloutLayout.parse(layout)
        settings = dict(longest=128, log=tmp_path / "logs", logprobs_mode="processed_logprobs")
        with Rollout(parsed, tmp_path / "model", contract, **settings) as engine:
            found.append(engine.sample(asked, stop=0))
            found.append(engine.sample(asked[::-1], stop=0)[::-1])
            found.append([engine.sample([request], stop=0)[0] for request in asked])
    assert all(each == found[0] for each in found)
    assert len({tuple(answer.tokens) for answer in found[0]}) == len(asked)


def test_tasks_are_the_same_every_time_and_their_answers_are_right():
    for name in tasks.TASKS:
        made = tasks.make(name, 1, 4, 50)
        assert made == tasks.make(name, 1, 4, 60)[:50] != tasks.make(name, 1, 5, 50) and made != tasks.make(name, 2, 4, 50)
        assert all(tasks.grade(task, task.answer) == 1.0 and 0 <= tasks.grade(task, task.answer + " x") < 1 for task in made)
    (task,) = tasks.make("sort", 1, 4, 1)
    assert task.answer.split() == sorted(task.prompt.split()[1:-1])
    (task,) = tasks.make("add", 1, 4, 1)
    left, right = task.prompt.removeprefix("add:").removesuffix("=").split("+")
    assert int(task.answer.replace(" ", "")) == int(left.replace(" ", "")) + int(right.replace(" ", ""))
    seeds = {tasks.sampling_seed(1, step, prompt, sample) for step in range(5) for prompt in range(5) for sample in range(5)}
    assert len(seeds) == 125 and max(seeds) < 2**63


def test_one_bit_is_seen():
    same = measure([[-1.0], [-2.0]], [[-1.0], [-2.0]], [[1.0], [1.0]], [[1.0], [1.0]], [0.0, 1.0])
    other = measure([[-1.0], [-2.0]], [[-1.0], [-2.0000002]], [[1.0], [1.0]], [[1.0], [1.0]], [0.0, 1.0])
    assert on_policy(same) and same["reward"] == 0.5 and same["tokens"] == 2
    assert not on_policy(other) and other["logdiff_nonzero"] == 1 and other["kl_k1"] > 0
    assert not on_policy(same | {"ratio_max": 1.0000001})


def test_a_step_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path)
    file.add({"step": 1, "reward": 0.5})
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: real(handle, content[:5]))
    with pytest.raises(OSError, match="No space left"):
        file.add({"step": 2, "reward": 0.25})
    monkeypatch.undo()
    file.add({"step": 2, "reward": 0.25})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.25}]
    file.add({"step": 3, "reward": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text().endswith('{"step": 3, "reward": null}\n')
    MetricsFile(tmp_path, [{"step": 1, "reward": 0.5}])
    assert len(read(tmp_path / "metrics.jsonl")) == len(list(tmp_path.glob("events.*"))) == 1


def test_event_files_hold_what_was_added(tmp_path):
    """Read back by the format's own description: records with two checksums, each an Event message."""
    file = EventFile(tmp_path)
    file.add(300, {"reward": 0.5, "kl": -1.25})
    content, events = file.path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = content[12 : 12 + length]
        for start, stop in ((0, 8), (12, 12 + length)):
            crc = crc32c(content[start:stop])
            masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack("<I", content[stop : stop + 4]) == (masked,)
        events.append(event[9:])  # behind the time
        content = content[16 + length :]
    value = lambda name, number: b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", number)  # noqa: E731
    values = b"".join(b"\x0a" + bytes([len(v)]) + v for v in (value(b"reward", 0.5), value(b"kl", -1.25)))
    assert events == [b"\x1a\x0dbrain.Event:2", b"\x10\xac\x02" + b"\x2a" + bytes([len(values)]) + values]


def test_the_picture_is_drawn_from_either_run_alone():
    step = dict(step=1, reward=0.5, kl_k1=0.0, kl_k3=0.0, ratio_min=1.0, ratio_max=1.0)
    for runs in ([[step], []], [[], [step]], [[step, step | {"step": 2}], [step]]):
        assert picture(runs)[:4] == b"\x89PNG"


@pytest.mark.parametrize("stock, bit, status", [(False, 0, 0), (False, 1, 1), (True, 1, 0)])
def test_one_step_off_policy_is_status_1(tmp_path, monkeypatch, capsys, stock, bit, status):
    """Everything but the steps themselves; one of three differs by one bit."""

    class First:
        first = True
        from_first = staticmethod(lambda make: make())

    same, other = (measure([[-1.0]], [[score]], [[1.0]], [[1.0]], [0.5]) for score in (-1.0, -1.0000001))
    steps = [step | {"step": number} for number, step in enumerate((same, other if bit else same, same), 1)]
    monkeypatch.setattr(rl, "prepared", lambda options, until: (None, [None], tmp_path / "scratch"))
    monkeypatch.setattr(rl_start, "starting_point", lambda *_: (tmp_path, None))
    monkeypatch.setattr(rl_loop, "Loop", lambda *_: SimpleNamespace(run=lambda: steps))
    options = parse(["--out", str(tmp_path), *(["--stock"] if stock else [])])
    assert rl._work(options, First, None) == status
    assert f"on policy in {3 - bit} of 3 steps" in capsys.readouterr().out and (tmp_path / "rl.png").is_file()


def test_ranks_and_layouts():
    assert parse([]).trainer.ranks == parse([], 2).trainer.ranks == 2 and str(parse([]).trainer) == "TP 2 EP 2 ETP 1 SP"
    assert parse([], 1).trainer.ranks == 1 and parse(["--tp", "1"], 4).trainer.layout.dp == 4
    assert str(parse(["--stock"]).job.out) == "out/rl/stock"
    with pytest.raises(SystemExit) as left:
        parse(["--help"])
    assert left.value.code == 0

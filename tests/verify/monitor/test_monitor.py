"""The monitor: numbers of every step, thresholds, and bundles that tio logdiff opens and that name nobody."""

import getpass
import json
import socket
import warnings

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.verify.monitor import LogdiffError, LogdiffWarning, Monitor, read_bundle
from tio_megatron.verify.monitor.bundle import MOST_SEQUENCES, public

TOKENS = torch.randint(0, 700, (3, 7))
SAME = -torch.rand(3, 7)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def other(at=(1, 2), by=2**-20):
    changed = SAME.clone()
    changed[at] += by
    return changed


def test_equal_steps_are_quiet_and_written(tmp_path):
    monitor = Monitor(tmp_path / "new" / "m", stop_above=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2):
            monitor.step(step, tokens=TOKENS, trainer=SAME, rollout=SAME.clone(), reward=0.5)
    found = lines(tmp_path / "new" / "m")
    assert [line["step"] for line in found] == [1, 2] and found[0]["reward"] == 0.5
    assert (found[0]["logdiff_max"], found[0]["logdiff_nonzero"], found[0]["kl_k3"], found[0]["ratio_max"], found[0]["tokens"]) == (0.0, 0, 0.0, 1.0, 21)
    assert not list(tmp_path.rglob("breach-*")) and list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    "value", [torch.tensor(0.25), torch.tensor([[0.25]], dtype=torch.bfloat16), torch.tensor(0.25, requires_grad=True), np.float32(0.25), np.array([0.25])]
)
def test_a_mean_as_a_loop_has_it(value, tmp_path):
    monitor = Monitor(tmp_path)
    assert monitor.step(1, tokens=TOKENS, trainer=SAME, rollout=SAME, reward=value, count=torch.tensor(3), met=np.bool_(True))["reward"] == 0.25
    assert (lines(tmp_path)[0]["reward"], lines(tmp_path)[0]["count"], lines(tmp_path)[0]["met"]) == (0.25, 3, True)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"reward": torch.zeros(3)}, r"reward is Tensor of shape \(3,\), no number"),
        ({"reward": "high"}, "reward is 'high', no number"),
        ({"loss": None}, "loss is None, no number"),
        ({"kl_k1": 0.0}, "kl_k1 is a number of the monitor's own"),
    ],
)
def test_what_is_no_number_is_said_before_anything_is_written(more, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        Monitor(tmp_path).step(1, tokens=TOKENS, trainer=SAME, rollout=SAME, **more)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_one_bit_warns_and_one_bit_stops(tmp_path):
    bit = SAME.numpy().copy()
    bit.view(np.uint32)[1, 2] ^= 1
    with pytest.warns(LogdiffWarning, match="step 4: max .*1 of 21 tokens differ"):
        Monitor(tmp_path / "warn").step(4, tokens=TOKENS, trainer=bit, rollout=SAME)
    with pytest.raises(LogdiffError, match="tio diagnose"):
        Monitor(tmp_path / "stop", stop_above=0.0).step(4, tokens=TOKENS, trainer=bit, rollout=SAME)
    assert len(lines(tmp_path / "stop")) == 1, "the step that stopped the run is on record"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Monitor(tmp_path / "above", warn_above=0.01).step(4, tokens=TOKENS, trainer=bit, rollout=SAME)


def test_masked_tokens_do_not_count(tmp_path):
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 2] = 0
    numbers = Monitor(tmp_path).step(1, tokens=TOKENS, trainer=other(), rollout=SAME, mask=mask)
    assert (numbers["logdiff_nonzero"], numbers["tokens"]) == (0, 20)


def test_a_bundle_holds_what_a_search_needs_and_nobody(tmp_path):
    configuration = {"trainer": "tp2+ep2", "model": f"/home/{getpass.getuser()}/qwen", "url": "https://x", "host": socket.gethostname(), "lr": 1e-5}
    with pytest.raises(LogdiffError):
        Monitor(tmp_path, stop_above=0.0, configuration=configuration).step(7, tokens=TOKENS, trainer=other(), rollout=SAME)
    bundle = read_bundle(tmp_path / "breach-00000007")
    assert bundle.about["configuration"] == {"trainer": "tp2+ep2", "model": "(left out)", "url": "(left out)", "host": "(left out)", "lr": 1e-5}
    assert bundle.about["statistics"]["logdiff_nonzero"] == 1 and bundle.about["versions"]["torch"]
    text = "".join(path.read_text() for path in (tmp_path / "breach-00000007").iterdir())
    assert str(tmp_path) not in text and socket.gethostname() not in text
    done = CliRunner().invoke(app, ["logdiff", str(bundle.trainer), str(bundle.rollout), "--json"])
    answer = json.loads(done.output)
    assert (done.exit_code, answer["nonzero"], answer["tokens"], answer["first"]["sequence"], answer["first"]["position"]) == (1, 1, 21, 1, 2)


def test_a_bundle_is_opened_by_diagnose(tmp_path):
    with pytest.raises(LogdiffError) as stopped:
        Monitor(tmp_path, stop_above=0.0).step(7, tokens=TOKENS, trainer=other(), rollout=SAME)
    command = str(stopped.value).rpartition("tio ")[2].split()
    done = CliRunner().invoke(app, [*command, "--json"])
    answer = json.loads(done.output)
    assert (done.exit_code, answer["bundle"]["step"], answer["logdiff"]["nonzero"]) == (1, 7, 1) and "tio record" in answer["next"][0]
    assert CliRunner().invoke(app, ["diagnose", str(tmp_path)]).exit_code == 2, "a folder that is no bundle"


@pytest.mark.parametrize("side", ["trainer", "rollout"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_bundle_of_what_is_no_number_is_opened_by_diagnose(side, value, tmp_path):
    broken = SAME.clone()
    broken[2, 3] = broken[2, 5] = value
    with pytest.raises(LogdiffError) as stopped:
        Monitor(tmp_path, stop_above=0.5).step(4, tokens=TOKENS, **({"trainer": SAME, "rollout": SAME} | {side: broken}))
    command = str(stopped.value).rpartition("tio ")[2].split()
    done = CliRunner().invoke(app, command)
    said = f"{side}: log-probability 3, 5 of sequence 2 is NaN or infinite"
    assert done.exit_code == 1 and said in done.output and "tio record" in done.output, done.output
    answer = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert answer["logdiff"] is None and answer["not_finite"] == [said]
    whole = "rollout" if side == "trainer" else "trainer"
    assert all(f"{whole}.jsonl" in line for line in answer["next"][:2])


def test_few_bundles_of_bounded_size(tmp_path):
    monitor = Monitor(tmp_path, most_bundles=2)
    tokens, same = torch.zeros(100, 3, dtype=torch.long), -torch.ones(100, 3)
    for step in range(4):
        with pytest.warns(LogdiffWarning):
            monitor.step(step, tokens=tokens, trainer=same - torch.arange(100).view(-1, 1) / 1024, rollout=same)
    assert len(list(tmp_path.glob("breach-*"))) == 2
    kept = read_bundle(tmp_path / "breach-00000000").about["sequences"]
    assert kept == list(range(100 - MOST_SEQUENCES, 100)), "those that differ most"


def test_nan_is_a_breach_of_any_threshold(tmp_path):
    with pytest.raises(LogdiffError, match="1 log-probabilities are not finite"):
        Monitor(tmp_path, stop_above=1e6).step(1, tokens=TOKENS, trainer=other(by=float("nan")), rollout=SAME)
    assert lines(tmp_path)[0]["nonfinite"] == 1


def test_a_batch_of_verl(tmp_path):
    class Proto:
        batch = {"responses": TOKENS, "old_log_probs": SAME, "rollout_log_probs": SAME.clone(), "response_mask": torch.ones(3, 7)}

    assert Monitor(tmp_path).verl(1, Proto)["logdiff_nonzero"] == 0
    del Proto.batch["rollout_log_probs"]
    with pytest.raises(ValueError, match="no rollout_log_probs; set actor_rollout_ref.rollout.calculate_log_probs=True"):
        Monitor(tmp_path).verl(1, Proto)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"trainer": SAME[:, :6]}, "trainer has sequences of"),
        ({"mask": torch.ones(2, 7)}, "mask has sequences of"),
        ({"trainer": SAME.bfloat16()}, "trainer is torch.bfloat16"),
        ({"trainer": SAME.double() / 3}, "no float32"),
        ({"trainer": SAME.half()}, "trainer is float16"),
        ({"tokens": TOKENS[0]}, "has shape [7]"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_written(tmp_path, changed, says):
    with pytest.raises(ValueError) as refused:
        Monitor(tmp_path).step(1, **{"tokens": TOKENS, "trainer": SAME, "rollout": SAME, **changed})
    assert says in str(refused.value) and not (tmp_path / "metrics.jsonl").exists()


def test_thresholds_are_numbers():
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stop_above"):
            Monitor("unused", stop_above=bad)


def test_private_parts_are_left_out_of_any_depth():
    assert public({"a": [{"password": "x"}, "me@x.org", "tp2"]}) == {"a": [{"password": "(left out)"}, "(left out)", "tp2"]}


def test_what_is_no_bundle_is_said(tmp_path):
    with pytest.raises(ValueError, match="trainer.jsonl, rollout.jsonl missing"):
        (tmp_path / "breach.json").write_text("{}")
        read_bundle(tmp_path)


def test_no_file_is_named_after_the_machine(tmp_path):
    with pytest.raises(LogdiffError):
        Monitor(tmp_path, stop_above=0.0).step(7, tokens=TOKENS, trainer=other(), rollout=SAME)
    for path in tmp_path.rglob("*"):
        assert socket.gethostname() not in path.name and getpass.getuser() not in path.name
    assert list(tmp_path.glob("events.out.tfevents.*"))


KILLED = """
import os, sys
import numpy as np
from tio_megatron.verify.monitor import bundle
from tio_megatron.verify.monitor.sides import Side
at, calls, write = int(sys.argv[2]), [0], bundle.write_whole
def dying(path, text, **how):
    calls[0] += 1
    if calls[0] == at:
        path.write_bytes(text[: len(text) // 2])
        os._exit(9)
    write(path, text, **how)
bundle.write_whole = dying
side = Side(np.arange(3), -np.ones(3, dtype=np.float32), -np.zeros(3, dtype=np.float32))
bundle.write_bundle(bundle.Path(sys.argv[1]) / "breach-00000001", [side], {"step": 1}, {})
"""


def test_a_bundle_is_whole_or_absent_when_the_process_dies(tmp_path):
    import subprocess
    import sys

    for at in (1, 2, 3):
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(at)], timeout=60)
        assert done.returncode == 9 and not list(tmp_path.glob("breach-*"))
    assert len(list(tmp_path.glob(".breach-*"))) == 1, "what dead processes left is taken away by the next"
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "4"], timeout=60)
    assert done.returncode == 0 and read_bundle(tmp_path / "breach-00000001").about["step"] == 1 and not list(tmp_path.glob(".breach-*"))


VERL = """
import sys, types
import torch
sys.path.insert(0, sys.argv[1])
import tio_megatron.verify.monitor.verl as hook
from verl.utils.debug.metrics import calculate_debug_metrics
tokens, same = torch.arange(6).view(2, 3), -torch.ones(2, 3)
batch = {"responses": tokens, "old_log_probs": same, "rollout_log_probs": same.clone(), "response_mask": torch.ones(2, 3)}
print(sorted(calculate_debug_metrics(types.SimpleNamespace(batch=batch, meta_info={"global_steps": 7})).items()))
batch["rollout_log_probs"][1, 1] -= 0.5
try:
    calculate_debug_metrics(types.SimpleNamespace(batch=batch, meta_info={"global_steps": 8}))
except Exception as error:
    print(type(error).__name__, error)
batch["rollout_log_probs"] = same.clone()
calculate_debug_metrics(types.SimpleNamespace(batch=batch))
print(open(sys.argv[1] + "/m/metrics.jsonl").read().splitlines()[-1][:11])
hook.patches.undo()
from verl.utils.debug.metrics import calculate_debug_metrics
print(len(calculate_debug_metrics(types.SimpleNamespace(batch=batch, meta_info={}))))
"""


def test_verls_trainer_is_watched_by_one_variable(tmp_path):
    """With a stand-in of the one function of verl that is patched: verl itself is not installed here."""
    import os
    import subprocess
    import sys
    from pathlib import Path

    folder = tmp_path / "verl" / "utils" / "debug"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent, folder.parent.parent):
        (place / "__init__.py").write_text("")
    (folder / "metrics.py").write_text("def calculate_debug_metrics(data):\n    return {'training/rollout_probs_diff_max': 0.0}\n")
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "TIO_MONITOR": str(tmp_path / "m"), "TIO_MONITOR_STOP_ABOVE": "0.25"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", VERL, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120)
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "('tio/logdiff_max', 0.0)" in said[0] and "('training/rollout_probs_diff_max', 0.0)" in said[0] and said[2:] == ['{"step": 9,', "1"]
    assert said[1].startswith("LogdiffError step 8: max |logdiff| 0.5, above 0.25 (1 of 6 tokens differ)")
    assert [line["step"] for line in lines(tmp_path / "m")] == [7, 8, 9] and read_bundle(tmp_path / "m" / "breach-00000008")


def test_a_run_that_goes_on_counts_from_the_last_step(tmp_path):
    monitor = Monitor(tmp_path)
    assert monitor.last_step() == 0
    for step in (3, 4):
        monitor.step(step, tokens=[[1]], trainer=[[-1.0]], rollout=[[-1.0]])
    assert Monitor(tmp_path).last_step() == 4
    (tmp_path / "metrics.jsonl").write_text('{"reward": 1}\n')
    with pytest.raises(ValueError, match="holds no step of a monitor"):
        Monitor(tmp_path).last_step()


def test_thresholds_of_the_environment():
    from tio_megatron.verify.monitor.verl import from_environment, patches

    patches.undo()
    with pytest.raises(ValueError, match="TIO_MONITOR_STOP_ABOVE='low' is no number"):
        from_environment({"TIO_MONITOR_STOP_ABOVE": "low"})

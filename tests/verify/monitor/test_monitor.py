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

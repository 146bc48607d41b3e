"""What the doctor says of environments: versions, variables, whose code stands at patched symbols; each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.findings.finding import LEVELS
from tio_megatron.integrations import npu_switches
from tio_megatron.integrations.patching import author_of
from tio_megatron.verify.doctor import examine, switches, worst

ROOT = Path(__file__).resolve().parents[3]


def doctor(folder, *arguments, **environ):
    """(exit status, answer) of ``tio doctor --json`` in a process of its own, with ``folder`` importable."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore", **environ}
    command = [sys.executable, "-m", "tio_megatron", "doctor", "--json", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def said(answer, topic):
    return [(finding["level"], finding["what"]) for finding in answer["findings"] if finding["topic"] == topic]


@pytest.mark.parametrize(
    "device, name, value, level",
    [
        ("npu", "CLOSE_MATMUL_K_SHIFT", "0", "bad"),
        ("npu", "ATB_MATMUL_SHUFFLE_K_ENABLE", "1", "bad"),
        ("cuda", "NCCL_NVLS_ENABLE", "1", "note"),
        ("cpu", "VLLM_BATCH_INVARIANT", "1", "bad"),
        ("cpu", "ONEDNN_DEFAULT_FPMATH_MODE", "bf16", "note"),
    ],
)
def test_a_variable_that_moves_an_order_is_named(device, name, value, level):
    environ = {"OMP_NUM_THREADS": "1"} | {switch.name: switch.value for switch in npu_switches.SWITCHES}
    environ |= {"VLLM_ASCEND_ENABLE_NZ": "0"} if device == "npu" else {}
    clean = {finding.level for finding in switches.check(device, plugged=True, environ=environ)}
    assert clean == {"ok"}
    broken = {key: one for key, one in {**environ, name: value}.items() if one is not None}
    found = [finding for finding in switches.check(device, plugged=True, environ=broken) if finding.level != "ok"]
    assert [(one.level, one.option) for one in found] == [(level, name)] and ": breaks: " in found[0].what and found[0].works


def test_a_release_that_nobody_tested_is_named(monkeypatch):
    from tio_megatron.verify.doctor import versions

    lock = dict(line.split(" ")[0].split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line and line[0] not in "#-")
    assert all(lock[package] in known for package, known in versions.TESTED.items() if package in lock) and "transformers" in lock
    assert not [*versions.untested()]
    monkeypatch.setattr(versions.releases, "installed", {"transformers": "6.0.0", "verl": "0.9.0"}.get)
    found = {finding.what.split()[0]: finding for finding in versions.untested()}
    assert set(found) == {"transformers", "verl"} and found["transformers"].works == "transformers 5.19.0"
    monkeypatch.setattr(versions.releases, "installed", lambda name: "9.9.9" if name != "triton" else None)
    bad = {finding.what.split()[0] for finding in versions.check() if finding.level == "bad"}
    assert {"torch", "megatron-core", "vllm"} <= bad


def test_stock_runs_hear_more_than_plugged_ones():
    stock = [finding.what for finding in switches.check("cuda", plugged=False, environ={})]
    assert any("NCCL chooses ring or tree by message size" in what for what in stock)
    assert [finding.level for finding in switches.check("cuda", plugged=True, environ={"OMP_NUM_THREADS": "1"})] == ["ok", "ok"]


def test_every_variable_that_is_set_is_said_to_help_break_or_neither():
    environ = {"NCCL_ALGO": "Ring", "NCCL_MAX_NCHANNELS": "4", "NCCL_NVLS_ENABLE": "1", "NCCL_FANCY": "1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    said = {finding.option or finding.what.split()[0]: finding for finding in switches.check("cuda", plugged=False, environ=environ)}
    assert ": helps: " in said["NCCL_ALGO"].what and ": neutral: " in said["NCCL_MAX_NCHANNELS"].what and ": breaks: " in said["NCCL_NVLS_ENABLE"].what
    assert "not known here" in said["NCCL_FANCY"].what and "NCCL_DEBUG" not in said


VALUES = (None, "", "0", "1", "2", "true", "True", "false", "strict", "STRICT", " strict", "yes")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", [switch.name for switch in npu_switches.SWITCHES])
def test_the_verdict_on_an_npus_switch_is_what_a_start_does(name, value):
    """Bad where :func:`prepare` refuses, a note where it sets, ok where it leaves what it finds; in a worker that has started, unset is bad."""
    from tio_megatron.integrations.ascend import switches as ascend

    environ = {} if value is None else {name: value}
    found = {finding.option: finding for finding in switches.judged("npu", environ, plugged=True)}[name]
    inside = {finding.option: finding for finding in switches.judged("npu", environ, plugged=True, started=True)}[name]
    try:
        done = "note" if name in ascend.prepare(dict(environ)) else "ok"
    except ascend.SwitchError as error:
        assert name in str(error) and found.works
        done = "bad"
    assert found.level == done and inside.level == ("bad" if done == "note" else done), (found, inside)


def test_doctor_and_start_agree_about_a_whole_environment():
    wrong = {"HCCL_DETERMINISTIC": "false", "LCCL_DETERMINISTIC": "0"}
    assert [one.level for one in switches.judged("npu", wrong | {"OMP_NUM_THREADS": "1"}, plugged=True)][:5] == ["bad", "bad", "note", "note", "note"]
    unset = [*switches.judged("npu", {"OMP_NUM_THREADS": "1"}, plugged=True)]
    assert worst(unset) == "note" and [one.what for one in unset][0].startswith("HCCL_DETERMINISTIC (unset): the start sets strict, before the process group")
    assert unset[-1].level == "ok" and unset[-1].what.startswith("no variable that moves an order on npu is set against it")


def test_npu_switches_are_one_table_with_two_readers():
    from tio_megatron.integrations.ascend import switches as ascend
    from tio_megatron.verify.doctor.switch_table import SWITCHES

    ours = {switch.name: switch for switch in SWITCHES if switch.device == "npu" and switch.name != "ACL_OPT_DETERMINISTIC"}
    assert set(ours) == {switch.name for switch in ascend.SWITCHES}
    environ: dict = {}
    ascend.prepare(environ)
    assert all(switches.effect(ours[name], value) == "helps" for name, value in environ.items()) and len(environ) == len(ours)
    assert all(switches.effect(switch, None) == "breaks" for switch in ours.values())
    refused = {name: next(value for value in switch.breaks if value != "unset") for name, switch in ours.items()}
    for name, value in refused.items():
        with pytest.raises(ascend.SwitchError, match=name):
            ascend.prepare({name: value})


def test_variables_of_vllm_in_the_table_are_vllms():
    import vllm.envs

    from tio_megatron.verify.doctor.switch_table import SWITCHES

    names = {switch.name for switch in SWITCHES if switch.name.startswith("VLLM_")}
    assert not names - set(vllm.envs.environment_variables)


def test_the_worst_level_counts():
    assert [worst(findings) for findings in ([], examine().findings)][0] == "ok" and LEVELS[-1] == "bad"
    with pytest.raises(ValueError, match="--rollout: missing"):
        examine(model="Qwen3-30B-A3B", trainer="tp1")


def test_author_sees_through_wrappers():
    import functools

    @functools.wraps(os.path.join)
    def wrapped():
        pass

    assert author_of(os.path.join) == "posixpath" and author_of(wrapped) == __name__.partition(".")[0]


def test_nothing_applied_is_a_note(tmp_path):
    status, answer = doctor(tmp_path, "--model", "Qwen3-30B-A3B", "--trainer", "tp2+ep2", "--rollout", "tp4")
    assert status == 0 and any("no contract is applied in this process" in what for _, what in said(answer, "patches"))
    assert answer["fingerprint"] and said(answer, "contract") == [("ok", "trainer TP 2 EP 2 ETP 1 SP and rollout TP 4: every cut falls on leaves")]


def test_a_patch_over_ours_is_found_by_name(tmp_path):
    (tmp_path / "meddler.py").write_text(
        "import tio_megatron.auto\nfrom megatron.core.tensor_parallel import mappings\ndef reduce(*a, **k): pass\nmappings._reduce = reduce\n"
    )
    status, answer = doctor(tmp_path, "--import", "meddler", TIO_CONTRACT="1")
    bad = [what for level, what in said(answer, "patches") if level == "bad"]
    assert status == 1 and len(bad) == 1
    assert bad[0].startswith("megatron.core.tensor_parallel.mappings:_reduce") and "meddler" in bad[0]


@pytest.mark.full
def test_our_patches_are_ours(tmp_path):
    status, answer = doctor(tmp_path, "--import", "tio_megatron.auto", TIO_CONTRACT="1")
    assert status == 0 and any(level == "ok" and "symbols are ours" in what for level, what in said(answer, "patches"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--import", "no_such_module"], "no_such_module: cannot be imported"), (["--model", "x", "--trainer", "tp1", "--rollout", "tp1"], "no such folder")],
)
def test_what_cannot_be_imported_or_read_is_status_2(arguments, says):
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])  # in this process: it changes nothing, and starting another one takes seconds
    assert done.exit_code == 2 and says in json.loads(done.stdout)["error"]


def test_plug_ins_that_vllm_is_told_to_leave_out(tmp_path):
    _, answer = doctor(tmp_path, VLLM_PLUGINS="other")
    assert ("bad", "VLLM_PLUGINS='other' leaves tio_megatron out") in said(answer, "patches")

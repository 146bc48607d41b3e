"""The doctor for an NPU against the start of an engine there: one verdict on options, variables, the contract's family, and releases."""

import itertools
import json
import shlex
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from examples.qwen3_moe.npu_recipe import RECIPES, command, environment
from tio_megatron.cli import app
from tio_megatron.contract import Contract
from tio_megatron.contract.environment import read
from tio_megatron.contract.families import FAMILIES
from tio_megatron.integrations import releases
from tio_megatron.integrations.npu_switches import SWITCHES
from tio_megatron.integrations.vllm.ascend import refusals
from tio_megatron.kernels import npu_family
from tio_megatron.verify.doctor import examine, fit, held, model_of, on_npu, running, settings, switches, versions

CLEAN = {"OMP_NUM_THREADS": "1", "VLLM_ASCEND_ENABLE_NZ": "0"} | {switch.name: switch.value for switch in SWITCHES}
SOUND = {"enforce_eager": True, "async_scheduling": False, "block_size": 128, "dtype": "bfloat16"}


def started(given, environ, *, checkpoint="bfloat16"):
    """What vLLM 0.23 makes of arguments before the plug-in looks at them, and what that is refused for."""
    held = {"enforce_eager": False, "async_scheduling": None, "block_size": None, "dtype": "auto", "logprobs_mode": "raw_logprobs"} | given
    dtype = {"auto": {"float32": "bfloat16"}.get(checkpoint, checkpoint), "half": "float16", "float": "float32"}.get(held["dtype"], held["dtype"])
    config = SimpleNamespace(
        additional_config=held.get("additional_config") or {},
        model_config=SimpleNamespace(
            enforce_eager=held["enforce_eager"],
            dtype=f"torch.{dtype}",
            logprobs_mode=held["logprobs_mode"],
            enable_sleep_mode=held.get("enable_sleep_mode", False),
        ),
        cache_config=SimpleNamespace(user_specified_block_size=held["block_size"] is not None, block_size=held["block_size"] or 128),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE" if held["enforce_eager"] else "FULL_DECODE_ONLY")),
        scheduler_config=SimpleNamespace(async_scheduling=held["async_scheduling"] is not False),
        weight_transfer_config=held.get("weight_transfer_config"),
    )
    return list(refusals.problems(config, environ))


def doctored(given, environ, *, checkpoint="bfloat16"):
    found = [*on_npu.rollout(running.rollout("vllm", given), checkpoint, environ), *switches.judged("npu", environ, plugged=True)]
    return [finding for finding in found if finding.level == "bad"]


ONE = [
    ({}, {}),
    ({"enforce_eager": False}, {}),
    ({"block_size": 64}, {}),
    ({"dtype": "half"}, {}),
    ({"dtype": "auto"}, {}),
    ({"dtype": "float"}, {}),
    ({"async_scheduling": True}, {}),
    ({"async_scheduling": None}, {}),
    ({"logprobs_mode": "processed_logprobs"}, {}),
    ({"enable_sleep_mode": True}, {}),
    ({"weight_transfer_config": {"backend": "tio"}}, {}),
    ({"additional_config": {"enable_flashcomm1": True}}, {}),
    ({"additional_config": {"weight_nz_mode": 0, "enable_cpu_binding": True}}, {"VLLM_ASCEND_ENABLE_NZ": None}),
    ({"additional_config": {"weight_nz_mode": 1}}, {}),
    ({}, {"VLLM_ASCEND_ENABLE_NZ": None}),
    *(({}, {name: "7"}) for name in refusals.ENVIRONMENT),
]
"""What differs from an engine that is taken: arguments, and variables."""


@pytest.mark.parametrize("checkpoint", ["bfloat16", "float16", "float32"])
def test_options_and_variables_have_one_verdict(checkpoint):
    counts = set()
    for (given, more), (other, further) in itertools.combinations_with_replacement(ONE, 2):
        arguments = SOUND | given | other
        environ = {name: value for name, value in (CLEAN | more | further).items() if value is not None}
        refused, bad = started(arguments, environ, checkpoint=checkpoint), doctored(arguments, environ, checkpoint=checkpoint)
        assert len(bad) == len(refused), (arguments, environ, refused, bad)
        for line in refused:
            assert any(line.why in finding.why and finding.works and line.option == finding.option for finding in bad), (line, bad)
        counts.add(len(refused))
    assert {0, 1, 2} <= counts or checkpoint == "float16"


def test_a_server_with_nothing_said_is_refused_as_its_start_would():
    bad = doctored({}, CLEAN)
    assert [finding.option.split()[0] for finding in bad] == ["graphs", "async_scheduling"]
    assert bad[1].works == "use async_scheduling=False"


@pytest.mark.parametrize(
    "source, levels",
    [
        ("--additional-config '{\"weight_nz_mode\": 0}'", []),
        ("--additional-config.weight_nz_mode 0", []),
        ("--additional-config.enable_fused_mc2 1", ["bad"]),
        ("--additional-config '{\"no_such_key\": 1}'", ["unknown"]),
        ("--additional-config nonsense", ["unknown"]),
    ],
)
def test_keys_of_additional_config_are_judged_however_they_are_written(source, levels, monkeypatch):
    for name, value in CLEAN.items():
        monkeypatch.setenv(name, value)
    found = examine(model="Qwen3-0.6B", trainer="tp1", rollout=f"--enforce-eager --no-async-scheduling --dtype bfloat16 {source}", device="npu").findings
    assert [finding.level for finding in found if "additional_config" in finding.what] == levels


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_is_taken_and_each_of_its_lines_is_needed(name, monkeypatch):
    """verl's command line as the launch script prints it, and again without one line or with another value."""
    for key, value in ({"OMP_NUM_THREADS": "1"} | environment(RECIPES[name])).items():
        monkeypatch.setenv(key, value)
    words = command(RECIPES[name], "Qwen3-30B-A3B", "train.parquet", 8)[1:]
    part = "actor_rollout_ref.rollout"

    def bad(lines):
        read = settings.rollout(shlex.join(lines)).running
        return [finding.what for finding in on_npu.rollout(read, "bfloat16", CLEAN)]

    assert bad(words) == []
    for line, said in (
        (f"{part}.enforce_eager=True", "graphs"),
        (f"{part}.logprobs_mode=raw_logprobs", "processed_logprobs"),
        (f"+{part}.enable_sleep_mode=False", "enable_sleep_mode"),
        (f"+{part}.engine_kwargs.vllm.async_scheduling=False", "async_scheduling"),
    ):
        assert line in words and said in bad([word for word in words if word != line])[0]
    assert "block_size=64" in bad([word.replace("block_size=128", "block_size=64") for word in words])[0]
    found = examine(model="Qwen3-30B-A3B", trainer="tp2+ep8", rollout=shlex.join(words), device="npu").findings
    assert not [finding for finding in found if finding.level == "bad" and finding.what.startswith(("rollout", "VLLM_", "TIO_"))]


def test_a_family_runs_on_its_own_device_alone(monkeypatch):
    """Every family on every device, by --contract and by the environment; without either the device's own."""
    for (name, family), device in itertools.product(FAMILIES.items(), ("cpu", "cuda", "npu")):
        text = json.dumps({"family": name})
        for contract in (text, None):
            monkeypatch.setenv("TIO_CONTRACT", "0" if contract else text)
            found = [one for one in examine(contract=contract, device=device).findings if "its kernels run on" in one.what]
            assert [one.level for one in found] == ([] if family.device == device else ["bad"])
            assert all(("--contract" if contract else "TIO_CONTRACT") in one.what and held.of_device(device) in one.works for one in found)
        assert not [one for one in examine(device=device, plugged=False).findings if "its kernels run on" in one.what]
    monkeypatch.delenv("TIO_CONTRACT")
    for device in ("cpu", "cuda", "npu"):
        found = examine(model="Qwen3-30B-A3B", trainer="tp2+ep8", rollout="tp4+ep", device=device).fit.contract
        assert FAMILIES[found.family].device == device


def test_a_plan_writes_a_contract_of_the_devices_family(tmp_path):
    given = ["plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp2+ep8", "--rollout", "tp4+ep", "--out", str(tmp_path / "contract.json")]
    for device in ("cpu", "cuda", "npu"):
        assert CliRunner().invoke(app, [*given, "--device", device]).exit_code == 0
        assert FAMILIES[read(str(tmp_path / "contract.json")).contract.family].device == device
    assert CliRunner().invoke(app, [*given, "--device", "tpu"]).exit_code == 2


def test_the_contract_of_the_environment_is_the_one_that_is_looked_at(monkeypatch):
    """TIO_CONTRACT=1 has eight leaves: sixteen ranks do not fall on them, though a contract for sixteen would hold."""
    shape = model_of("Qwen3-32B").shape
    given = {"model": "Qwen3-32B", "trainer": "tp1", "rollout": "tp16"}
    wide = settings.rollout("tp16").layout.layout
    assert fit(shape, settings.trainer("tp1").layout.layout, wide, contract=Contract()).findings[0].level == "bad"
    monkeypatch.delenv("TIO_CONTRACT", raising=False)
    assert not [one for one in examine(**given).findings if one.level == "bad" and one.topic == "contract"]
    monkeypatch.setenv("TIO_CONTRACT", "1")
    assert [one for one in examine(**given).findings if one.level == "bad" and one.topic == "contract"]
    monkeypatch.setenv("TIO_CONTRACT", "{")
    with pytest.raises(ValueError, match="TIO_CONTRACT"):
        examine(**given)


def test_the_attentions_package_is_judged_as_the_start_does():
    for value in (None, "", *npu_family.ROUTES, "foo", "Vendor", "flash"):
        environ = CLEAN | ({} if value is None else {npu_family.VARIABLE: value})
        found = [one for one in switches.judged("npu", environ, plugged=True) if one.what.startswith(npu_family.VARIABLE)]
        try:
            npu_family.asked(environ)
        except ValueError:
            assert [one.level for one in found] == ["bad"] and "vendor" in found[0].works
        else:
            assert all(one.level in ("ok", "note") for one in found)
    assert not [one for one in switches.judged("cpu", {npu_family.VARIABLE: "foo"}, plugged=True) if one.what.startswith(npu_family.VARIABLE)]


def test_a_worker_that_has_started_was_judged_by_its_start():
    environ = {name: value for name, value in CLEAN.items() if name != "VLLM_ASCEND_ENABLE_NZ"}
    assert {one.level for one in switches.judged("npu", environ, plugged=True, started=True)} == {"ok"}
    assert "note" in {one.level for one in switches.judged("npu", environ, plugged=True)}  # with no options given: what decides is not known


def test_the_releases_of_an_npus_rollout_are_those_of_vllm_ascend(monkeypatch):
    here = {"torch": "2.10.0", "vllm": "0.23.0", "vllm-ascend": "0.23.0", "megatron-core": "0.16.1", "torch-npu": "2.10.0"}
    monkeypatch.setattr(versions.releases, "installed", here.get)

    def bad(device):
        return {finding.what.split()[0] for finding in versions.check(device=device) if finding.level == "bad"}

    assert bad("npu") == set() and bad("cpu") == {"torch", "vllm"}
    here |= {"vllm": "0.32.0", "torch": "2.13.0"}
    assert bad("npu") == {"torch", "vllm"} and bad("cpu") == set()
    del here["vllm-ascend"]
    assert bad("npu") == set() and any("vllm-ascend is not installed" in one.what for one in versions.check(device="npu"))
    assert releases.ON_ASCEND["vllm"] == ("0.23.0",)


@pytest.mark.parametrize("model, level", [("Qwen3-32B", "bad"), ("Qwen3-8B", "ok")])
def test_a_model_that_the_familys_kernels_refuse_has_no_contract(model, level, tmp_path, monkeypatch):
    """5120 columns are no power of two: its norms would be refused in the first forward."""
    monkeypatch.delenv("TIO_CONTRACT", raising=False)
    for contract in (None, '{"family": "npu-910b"}'):
        found = examine(model=model, trainer="tp2", rollout="tp2", device="npu", contract=contract)
        ours = [one for one in found.findings if one.topic == "contract"]
        assert {one.level for one in ours} == {level} and ("5120" in ours[0].what) == (level == "bad") and not found.fit.nearest
    out = tmp_path / "contract.json"
    given = ["plan", "--model", model, "--trainer", "tp2", "--rollout", "tp2", "--out", str(out)]
    assert CliRunner().invoke(app, [*given, "--device", "npu"]).exit_code == (level == "bad") and out.exists() == (level == "ok")
    assert CliRunner().invoke(app, [*given, "--device", "cpu"]).exit_code == 0

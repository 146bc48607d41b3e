"""A contract in a side's own arguments is the one that side loads, so it is the one that is judged."""

import json

import pytest

from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron_lm.options import OFF
from tio_megatron.integrations.vllm.front import ARGUMENT
from tio_megatron.verify import doctor
from tio_megatron.verify.doctor import examine, held

TRAINER = "--tensor-model-parallel-size 2 --sequence-parallel --num-layers 28 --bf16"
ROLLOUT = "--tensor-parallel-size 2 --dtype bfloat16 --block-size 128 --enforce-eager --no-async-scheduling"
NPU = '{"family": "npu-910b"}'
CPU = '{"family": "cpu"}'


@pytest.fixture(autouse=True)
def configuration_alone(monkeypatch):
    for part in ("versions", "switches", "symbols"):
        monkeypatch.setattr(getattr(doctor, part), "check", lambda *_, **__: ())
    monkeypatch.delenv("TIO_CONTRACT", raising=False)


def said(trainer="", rollout="", device="npu", **more):
    """(level, what) about the contract, without what is sound."""
    found = examine(model="Qwen3-0.6B", trainer=f"{TRAINER} {trainer}", rollout=f"{ROLLOUT} {rollout}", device=device, **more)
    return [(one.level, one.what) for one in found.findings if (one.topic == "contract" or one.option.startswith("additional_config")) and one.level != "ok"]


def additional(contract):
    return f"--additional-config '{json.dumps({ARGUMENT: contract})}'"


def test_the_names_are_the_starts():
    assert held.KEY == ARGUMENT and held.MEGATRON_OFF == OFF


@pytest.mark.parametrize("around", [None, NPU])
@pytest.mark.parametrize(
    "sides, words",
    [
        ({"rollout": additional({"family": "cpu"})}, "rollout: additional_config['tio_contract'] names family cpu"),
        ({"rollout": additional("1")}, "rollout: additional_config['tio_contract'] names family cpu"),
        ({"rollout": f"--additional-config.{ARGUMENT} 1"}, "rollout: additional_config['tio_contract'] 1: contract: expected"),
        ({"trainer": "--tio-contract 1"}, "trainer: --tio-contract names family cpu"),
        ({"trainer": f"--tio-contract '{CPU}'"}, "trainer: --tio-contract names family cpu"),
        ({"trainer": "--tio-contract 0"}, "trainer: --tio-contract 0: leaves Megatron-LM stock"),
        ({"trainer": "--tio-contract off"}, "leaves Megatron-LM stock"),
        ({"trainer": "--tio-contract nofile.json"}, "trainer: --tio-contract 'nofile.json': contract: 'nofile.json' is neither"),
    ],
)
def test_what_a_start_would_refuse_is_bad(sides, words, around, monkeypatch):
    if around:
        monkeypatch.setenv("TIO_CONTRACT", around)
    assert any(level == "bad" and words in what for level, what in said(**sides)), said(**sides)
    assert not any(words in what for _, what in said(plugged=False, **sides))


def test_two_sides_have_one_contract(monkeypatch):
    ours, other = Contract(family="npu-910b").to_dict(), Contract(family="npu-910b", grain=256).to_dict()
    trainer = f"--tio-contract '{NPU}'"
    assert said(trainer, additional(ours)) == []
    ((level, what),) = said(trainer, additional(other))
    assert level == "bad" and "two sides, two contracts" in what and "grain: 512 / 256" in what
    ((level, what),) = said(trainer)
    assert level == "note" and "the rollout must be given the same" in what
    monkeypatch.setenv("TIO_CONTRACT", NPU)
    assert said(trainer) == [] and said(rollout=additional(ours)) == []
    ((level, what),) = said(rollout=additional(other))
    assert level == "bad" and "trainer: TIO_CONTRACT and rollout: additional_config" in what


def test_the_contract_of_the_arguments_is_the_one_that_layouts_are_held_to():
    """A named one has leaves of its own, and no smallest is made."""
    text = Contract().to_json()
    found = examine(model="Qwen3-0.6B", trainer=f"{TRAINER} --tio-contract '{text}'", rollout=ROLLOUT, device="cpu")
    assert found.fit.contract == Contract() and examine(model="Qwen3-0.6B", trainer=TRAINER, rollout=ROLLOUT).fit.contract != Contract()


def test_a_variable_is_not_known():
    found = examine(model="Qwen3-0.6B", trainer=f"{TRAINER} --tio-contract $CONTRACT", rollout=ROLLOUT, device="npu").findings
    assert [one.level for one in found if "$CONTRACT" in one.what] == ["unknown"]


def test_elsewhere_a_contract_alone_needs_no_judging_as_a_platforms_setting():
    assert [level for level, what in said(rollout=additional(Contract().to_dict()), device="cpu")] == ["note"]
    assert "unknown" in {level for level, _ in said(rollout="--additional-config '{\"no_such_key\": 1}'", device="cpu")}

"""Whether a contract can hold, which product forbids it, and that every layout named as near really works."""

import json

import pytest

from tio_megatron.contract import Contract, Cuts, Layout
from tio_megatron.contract.words import TrainerLayout
from tio_megatron.testing.qwen3 import DENSE
from tio_megatron.verify.doctor import fit, shape_of
from tio_megatron.verify.doctor.fits import _trainer

MODEL = shape_of("Qwen3-30B-A3B")


@pytest.mark.parametrize("trainer, rollout", [("tp4+pp2+cp2+ep8+etp1", Layout.for_vllm(4)), ("tp2+ep8", Layout.for_vllm(4, True)), ("tp1", Layout.for_vllm(1))])
def test_layouts_people_run_fit(trainer, rollout):
    found = fit(MODEL, TrainerLayout.parse(trainer).layout, rollout)
    assert [finding.level for finding in found.findings] == ["ok"] and not found.nearest


@pytest.mark.parametrize(
    "trainer, rollout, says",
    [
        (Layout(tp=8, ep=8, etp=1, sp=True), Layout.for_vllm(8), "tp 8 is above the 4 key/value heads"),
        (Layout(tp=3, etp=3, sp=True), Layout(), "32 query heads do not divide by tp 3"),
        (Layout(ep=3, etp=1, dp=3), Layout(), "128 experts do not divide by ep 3"),
        (Layout(pp=5), Layout(), "48 layers do not divide by pp 5"),
        (Layout(tp=2, etp=2), Layout(), "Megatron trains experts under tp only with it"),
        (Layout(ep=8, etp=1, dp=3), Layout(), "ep 8 times etp 1 does not divide the 3 ranks"),
        (Layout(), Layout.for_vllm(6), "32 query heads do not divide by tp 6"),
    ],
)
def test_what_forbids_it_is_named_and_what_is_near_works(trainer, rollout, says):
    found = fit(MODEL, trainer, rollout)
    assert any(says in finding.what for finding in found.findings if finding.level == "bad"), found.findings
    assert found.nearest, "something works"
    for left, right in found.nearest:
        contract = Contract.for_layouts(left, right)
        assert not [*_trainer(contract, MODEL, left, True)] and not [*contract.problems(right, MODEL)]
        assert left.tp * left.pp * left.cp * left.dp == trainer.tp * trainer.pp * trainer.cp * trainer.dp, "the ranks are those that were asked for"


def test_scoring_alone_may_share_key_value_heads():
    wide = Layout(tp=8, ep=8, etp=1, sp=True)
    assert fit(MODEL, wide, Layout.for_vllm(8), training=False).findings[0].level == "ok"


def test_a_contract_that_is_given_is_held():
    small = Contract(cuts=Cuts.uniform(2))
    found = fit(MODEL, Layout(), Layout.for_vllm(4), contract=small)
    assert any("cuts.attn_row = 2 leaves" in finding.what for finding in found.findings)
    assert all(right.tp <= 2 for _, right in found.nearest) and found.nearest


def test_models_by_name_and_by_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert shape_of(str(tmp_path)) == shape_of(str(tmp_path / "config.json")) and shape_of(str(tmp_path)).heads == 8
    with pytest.raises(ValueError, match="known by name are .*Qwen3-30B-A3B"):
        shape_of("Qwen4")

"""What nobody writes has a default, and the default runs: ``tio doctor`` compares it with the model wherever nothing else supplies the value."""

import json

import pytest

from tio_megatron.testing.qwen3 import MOE
from tio_megatron.verify.doctor import examine, worst

OPTIONS = (
    "--swiglu --bf16 --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --num-experts 128 "
    "--moe-router-topk 8 --qk-layernorm --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1"
)
VLLM = "--tensor-parallel-size 4 --generation-config vllm"


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Versions, switches and symbols of this process say nothing about options."""
    for part in ("versions", "switches", "symbols"):
        monkeypatch.setattr(f"tio_megatron.verify.doctor.{part}.check", lambda *_, **__: ())


def judged(trainer, rollout=VLLM, model="Qwen3-30B-A3B"):
    """The worst level, and what is bad."""
    findings = examine(model=model, trainer=trainer, rollout=rollout).findings
    return worst(findings), [finding.what for finding in findings if finding.level == "bad"]


def test_defaults_count_where_no_size_is_written():
    level, bad = judged(OPTIONS)
    assert level == "bad" and len(bad) == 2, bad
    assert any("layernorm_epsilon=1e-05" in what for what in bad) and any("rotary_base=10000" in what for what in bad)
    assert judged(f"{OPTIONS} --norm-epsilon 1e-6 --rotary-base 1000000")[0] == "ok"  # the control


def test_a_model_without_experts_is_another_than_one_with():
    level, bad = judged(f"{OPTIONS} --norm-epsilon 1e-6 --rotary-base 1000000".replace("--num-experts 128", ""))
    assert level == "bad" and any("num_moe_experts=None" in what for what in bad)


def test_what_a_checkpoints_arguments_supply_is_unknown_and_what_they_do_not_supply_has_its_default():
    """Megatron-LM reads the rotary base there, and not the norm's epsilon."""
    taken = "--use-checkpoint-args --tensor-model-parallel-size 2 --sequence-parallel --bf16 --qk-layernorm --moe-token-dispatcher-type alltoall"
    level, bad = judged(taken)
    assert level == "bad" and len(bad) == 1 and "layernorm_epsilon=1e-05" in bad[0], bad
    assert judged(f"{taken} --norm-epsilon 1e-6") == ("unknown", [])


@pytest.mark.parametrize("mode, level", [("processed_logprobs", "bad"), ("raw_logprobs", "note")])
def test_log_probabilities_of_a_cut_distribution_are_no_trainers(tmp_path, mode, level):
    """A model whose ``generation_config.json`` cuts the distribution, as Qwen3's does."""
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    rollout = f"--generation-config auto --logprobs-mode {mode}"
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 20, "top_p": 0.95}))
    found = examine(model=str(tmp_path), trainer="tp1", rollout=rollout).findings
    assert [finding.level for finding in found if "top_k=20" in finding.what] == [level]
    assert worst(found) == level
    (tmp_path / "generation_config.json").write_text("{}")
    assert worst(examine(model=str(tmp_path), trainer="tp1", rollout=rollout).findings) == "note"  # the control: nothing is cut

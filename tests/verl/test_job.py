"""The GRPO job in stock verl: verl's own metrics read 0 under the contract, and do not without it. Needs verl: make test-verl."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

ROOT = Path(__file__).resolve().parents[2]
ZERO = (
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
    "actor/ppo_kl",
)


def run(out: Path, *overrides: str, ranks: int = 1, dense: bool = False, **environment: str) -> list[dict[str, float]]:
    """verl's numbers of each step."""
    if dense:
        subprocess.run([sys.executable, "-W", "ignore", "-m", "examples.qwen3_moe.verl_start", str(out), "--dense"], cwd=ROOT, check=True)
    variables = {**os.environ, "PYTHON": sys.executable, "RANKS": str(ranks), **environment}
    command = ["timeout", "-k", "10", "540", "bash", str(ROOT / "launch" / "qwen3_moe_verl.sh"), str(out), *overrides]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_on_policy(steps: list[dict[str, float]]) -> None:
    assert len(steps) == 3
    for step in steps:
        assert step["training/rollout_probs_diff_valid"] == 1
        assert {name: step[name] for name in ZERO} == dict.fromkeys(ZERO, 0.0)
        assert step["actor/grad_norm"] > 0, "the weights moved, so a later step's zeros are about pushed weights"


@pytest.mark.parametrize("dense", [False, True], ids=["experts", "dense"])
def test_verls_metrics_read_zero_under_the_contract(tmp_path: Path, dense: bool) -> None:
    assert_on_policy(run(tmp_path, dense=dense))


def test_at_another_temperature_and_with_offloading_between_phases(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor.megatron"
    offload = (f"{actor}.param_offload=True", f"{actor}.optimizer_offload=True")
    assert_on_policy(run(tmp_path, "actor_rollout_ref.rollout.temperature=0.7", *offload))


def test_two_ranks_tensor_and_expert_parallel_against_one_engine_of_two(tmp_path: Path) -> None:
    actor, rollout = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
    layout = (f"{actor}.tensor_model_parallel_size=2", f"{actor}.expert_model_parallel_size=2", f"{actor}.sequence_parallel=True")
    assert_on_policy(run(tmp_path, *layout, f"{actor}.expert_tensor_parallel_size=1", f"{rollout}.tensor_model_parallel_size=2", ranks=2))


def test_without_the_contract_they_do_not(tmp_path: Path) -> None:
    """The same model and the same job, stock."""
    steps = run(tmp_path, TIO_CONTRACT="0")
    assert len(steps) == 3 and all(step["actor/grad_norm"] > 0 for step in steps)
    assert max(step["training/rollout_probs_diff_max"] for step in steps) > 0
    assert max(step["rollout_corr/k3_kl"] for step in steps) > 0

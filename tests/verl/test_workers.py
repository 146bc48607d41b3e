"""A worker of stock verl in which the plug-in did not load is named at start, by every worker that has it. Needs verl: make test-verl."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "actor_rollout_ref.actor.megatron.override_transformer_config"
FUSED = ("moe_grouped_gemm", "persist_layer_norm", "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion")
STOCK = (*(f"+{CONFIG}.{name}=False" for name in FUSED), f"{CONFIG}.attention_backend=unfused")
"""Or a stock trainer does not get as far as a model on a CPU."""


def refused(out: Path, *overrides: str, ranks: int = 1, **environment: str) -> str:
    """What a job that does not start prints."""
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    variables = {**os.environ, "PYTHON": sys.executable, "RANKS": str(ranks), "PYTHONPATH": path, **environment}
    command = ["timeout", "-k", "10", "400", "bash", str(ROOT / "launch" / "qwen3_moe_verl.sh"), str(out), *overrides]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode not in (0, 124), said[-6000:]
    assert not (out / "metrics.jsonl").exists(), "no step was taken"
    return said


def test_no_worker_of_the_trainer_has_it(tmp_path: Path) -> None:
    """The rollout's workers find it through vLLM, and end the start."""
    said = refused(tmp_path, *STOCK, VERL_USE_EXTERNAL_MODULES="json")
    assert "verl's trainer would be stock" in said and "VERL_USE_EXTERNAL_MODULES=tio_megatron.auto in the environment of every worker" in said, said[-6000:]


def test_one_rank_of_the_trainer_lacks_it(tmp_path: Path) -> None:
    actor, rollout = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
    layout = (f"{actor}.tensor_model_parallel_size=2", f"{actor}.expert_model_parallel_size=2", f"{actor}.sequence_parallel=True")
    layout = (*layout, f"{actor}.expert_tensor_parallel_size=1", f"{rollout}.tensor_model_parallel_size=2")
    said = refused(tmp_path, *STOCK, *layout, ranks=2, VERL_USE_EXTERNAL_MODULES="verl_forgets", TIO_START_SECONDS="20")
    assert "rank 1: tio_megatron did not load there" in said and "rank 0: tio_megatron did not load" not in said, said[-6000:]


def test_no_worker_of_the_rollout_has_it(tmp_path: Path) -> None:
    """Beside a trainer that has it: VLLM_PLUGINS leaves ours out. The trainer asks before it pushes weights."""
    said = refused(tmp_path, VLLM_PLUGINS="none")
    assert "verl's rollout would be stock: tio_megatron did not load in a worker of its vLLM" in said and "VLLM_PLUGINS" in said, said[-6000:]


def test_an_option_of_verls_own_that_is_not_covered(tmp_path: Path) -> None:
    said = refused(tmp_path, "actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.actor.megatron.vanilla_mbridge=False")
    assert "actor_rollout_ref.rollout.top_p=0.9: " in said and "actor_rollout_ref.actor.megatron.vanilla_mbridge=False: " in said, said[-6000:]

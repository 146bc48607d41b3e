"""``tio doctor --run``: a launch script is run with recording stand-ins, and what it would have started is judged."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.verify.doctor import recorded

SCRIPT = r"""#!/bin/bash
set -eu
TP=${TP:-2}
ARGS=(--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --ffn-hidden-size 6144)
ARGS+=(--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --norm-epsilon 1e-6 --rotary-base 1000000 --qk-layernorm --swiglu --bf16)
for flag in disable-bias-linear untie-embeddings-and-output-weights; do ARGS+=("--$flag"); done
if [ "$TP" -gt 1 ]; then ARGS+=(--sequence-parallel); fi
touch "$(dirname "$0")/ran"
export TIO_CONTRACT=${CONTRACT:-1} NOTE="two words"
torchrun --nproc-per-node 8 -m tio_megatron.run pretrain_gpt.py --tensor-model-parallel-size "$TP" --expert-model-parallel-size 4 \
  --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --normalization RMSNorm --position-embedding-type rope \
  --hidden-dropout ${DROPOUT:-0} --attention-dropout 0 "${ARGS[@]}"
vllm serve Qwen/Qwen3-30B-A3B -tp 4 --generation-config vllm --dtype bfloat16 &
wait
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train it.sh"
    path.write_text(SCRIPT)
    return path


def doctor(script, *more, **environ):
    """(exit status, answer) of the command in a process without a terminal."""
    command = [sys.executable, "-m", "tio_megatron", "doctor", "--json", "--model", "Qwen3-30B-A3B", *more, "--run", "--", "bash", str(script)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    return done.returncode, json.loads(done.stdout)


def test_what_a_script_starts_is_judged_with_its_environment(script):
    status, answer = doctor(script, "--yes", OMP_NUM_THREADS="1")
    assert status == 0, [one for one in answer["findings"] if one["level"] in ("bad", "unknown")]
    assert (script.parent / "ran").exists()
    status, answer = doctor(script, "--yes", DROPOUT="0.1", CONTRACT="0")
    bad = {one["option"] for one in answer["findings"] if one["level"] == "bad"}
    assert status == 1 and bad == {"hidden_dropout", "TIO_CONTRACT"}


def test_nobody_is_there_to_be_asked(script):
    status, answer = doctor(script)
    assert status == 2 and "every line of the script runs" in answer["error"] and "--yes" in answer["error"]
    assert not (script.parent / "ran").exists()


def test_commands_are_recorded_word_by_word_and_told_apart(tmp_path):
    script = tmp_path / "many.sh"
    script.write_text(
        "python -c 'print(1)'\nA='a b' python3 train.py --num-layers 2 'x y' \"\"\nray job submit -- python -m vllm.entrypoints.openai.api_server -tp 2\n"
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm\nexit 3\n"
    )
    started, status = recorded.record(["bash", str(script)])
    assert status == 3 and [list(one.sides) for one in started] == [[], ["trainer"], ["rollout"], ["trainer", "rollout"]]
    assert started[1].words == ("python3", "train.py", "--num-layers", "2", "x y", "") and started[1].environment["A"] == "a b"
    assert recorded.of_side(started[:3], "trainer") is started[1] and recorded.of_side(started[:1], "rollout") is None
    with pytest.raises(ValueError, match="2 commands of a trainer were started"):
        recorded.of_side(started, "trainer")


def test_what_cannot_be_recorded_is_status_2(tmp_path):
    def refused(*arguments):
        done = CliRunner().invoke(app, ["doctor", "--json", "--model", "Qwen3-8B", "--rollout", "tp1", *arguments])
        assert done.exit_code == 2, done.output
        return json.loads(done.stdout)["error"]

    assert "go together" in refused("--run") and "go together" in refused("--", "true")
    assert "cannot be run" in refused("--yes", "--run", "--", str(tmp_path / "nothing"))

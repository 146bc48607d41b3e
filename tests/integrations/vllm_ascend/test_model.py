"""A model of vLLM 0.23's code with our layers, experts and attention in vllm-ascend's frame has the bytes of one of the vLLM installed here.

Needs the Python of vLLM 0.23 (``make test-vllm-ascend VLLM_ASCEND=DIR VLLM=DIR``). On a CPU, with stand-ins of vllm-ascend's classes: it shows that the
layers fit the older code, and nothing of an NPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm_model

from tio_megatron.testing.qwen3 import MOE, write_tiny

SUPPORT = Path(vllm_model.__file__).parent
VLLM = os.environ.get("VLLM", "")


def run(*arguments):
    """What ``vllm_model.py`` prints, run in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "vllm_model.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not VLLM, reason="VLLM is not set: make test-vllm-ascend VLLM_ASCEND=DIR VLLM=DIR, the unpacked wheel or sources of vLLM 0.23.0")
def test_a_model_in_vllm_0_23_has_the_bytes_of_one_in_vllm_0_32(tmp_path):
    model = write_tiny(tmp_path / "model", MOE)
    newer, older = run(model), run(model, VLLM)
    assert older["vllm"].startswith("0.23.") and older["where"] == str(Path(VLLM).resolve()) and not newer["vllm"].startswith("0.23.")
    assert {"TioFusedMoE", "TioReplicatedOrGate", "TioAscendAttentionImpl"} <= set(older["classes"]) and "TioRoutedExperts" in newer["classes"]
    assert (older["hidden"], older["logits"]) == (newer["hidden"], newer["logits"])
    # The control: other weights.
    other = run(write_tiny(tmp_path / "other", MOE, seed=1))
    assert other["hidden"] != newer["hidden"] and other["logits"] != newer["logits"]

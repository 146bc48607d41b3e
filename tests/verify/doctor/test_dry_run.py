"""``TIO_DRY_RUN=1``: the real start ends with its verdict, after the engine's own parser, and nothing is trained or served."""

import os
import subprocess
import sys

import pytest

from tio_megatron.testing.qwen3 import MOE, write_tiny

VLLM = """
import sys
from vllm import LLM
LLM(model=sys.argv[1], skip_tokenizer_init=True, max_model_len=512, enforce_eager=True, dtype="bfloat16", **eval(sys.argv[2]))
print("SERVED")
"""
MEGATRON = """
import os, sys
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import tio_megatron.auto
from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron.applied import refusals
from tio_megatron.integrations.megatron.weights.from_hf import transformer_config
from tio_megatron.integrations.megatron.applied.state import active
checkpoint = CheckpointConfig.from_file(sys.argv[1] + "/config.json")
config = transformer_config(checkpoint, Layout())
config.hidden_dropout = float(sys.argv[2])
refusals.check(config, {"position_embedding_type": "rope"}, active(), checkpoint.shape.vocab)
print("BUILT")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("dry") / "model", MOE)


def start(code, *arguments, **environ):
    """(exit status, standard output) of a start in a process of its own."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "VLLM_CPU_KVCACHE_SPACE": "1", "TIO_DRY_RUN": "1", "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


def test_a_trainer_ends_before_a_model_is_built(model):
    status, said = start(MEGATRON, model, 0, TIO_CONTRACT="1")
    assert status == 0 and "nothing forbids it" in said and "BUILT" not in said
    status, said = start(MEGATRON, model, 0.1, TIO_CONTRACT="1")
    assert status == 1 and "hidden_dropout=0.1: dropout is random per layout" in said and "BUILT" not in said
    status, said = start(MEGATRON, model, 0, TIO_CONTRACT="1", TIO_DRY_RUN="0")
    assert status == 0 and "BUILT" in said  # the control: without it the start goes on
    status, said = start(MEGATRON, model, 0, TIO_CONTRACT="")
    assert status == 2 and "nothing to judge by" in said


def test_an_engine_ends_before_it_loads_weights(model):
    status, said = start(VLLM, model, {}, TIO_CONTRACT="1")
    assert status == 0 and "nothing forbids it" in said and "SERVED" not in said
    status, said = start(VLLM, model, {"pipeline_parallel_size": 2}, TIO_CONTRACT="1")
    assert status == 1 and "pipeline_parallel_size=2: pipeline parallelism is not covered" in said
    status, said = start(VLLM, model, {}, TIO_CONTRACT="0")
    assert status == 2 and "nothing to judge by" in said and "SERVED" not in said

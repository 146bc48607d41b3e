"""``deepspeed.init_inference`` with tensor parallelism gives the logits of one process. Needs DeepSpeed: make test-deepspeed."""

import pytest

pytest.importorskip("deepspeed", reason="NOT RUN: deepspeed is not installed here: make test-deepspeed")

import deepspeed
import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (once; AutoTP would import it in every rank)
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from deepspeed_runs import Block, Layout, batches, build, here

import tio_megatron as tio
from tio_megatron.testing import assert_same_bytes, run_ranks

POLICY = {Block: ("attn.o_proj", "mlp.down_proj")}


def logits(rank, tp, ours, dtype):
    """Of one batch, and how many layers AutoTP has cut."""
    here(rank, tp)
    deepspeed.init_distributed()
    if ours:
        tio.apply()
    model = build(rank, Layout()).eval()
    engine = deepspeed.init_inference(model, dtype=dtype, tensor_parallel={"tp_size": tp, "tp_grain_size": 1}, injection_policy=POLICY)
    cut = sum(isinstance(module, LinearAllreduce | LinearLayer) for module in model.modules())
    with torch.no_grad():
        return engine(batches(1)[0, 0]), cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensor_parallel_inference(dtype):
    (alone, _), *_ = run_ranks(1, logits, 1, True, dtype)
    for found, cut in run_ranks(2, logits, 2, True, dtype):
        assert cut >= 12, f"AutoTP has cut {cut} linears, so this proves little"
        assert_same_bytes(found, alone, "logits")


def test_stock_differs():
    (alone, _), *_ = run_ranks(1, logits, 1, False, torch.float32)
    (found, _), *_ = run_ranks(2, logits, 2, False, torch.float32)
    assert found.numpy().tobytes() != alone.numpy().tobytes()

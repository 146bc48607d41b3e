"""megatron-core under the contract on a device that takes no tensor of the host: what it would do on a GPU or an NPU, with the CPU's bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tests.support.toy_device as toy
from benchmarks import main_job
from benchmarks.gpu_check import SMALL_MODEL
from examples.qwen3_moe import makers
from tests.support import strict_device
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract
from tio_megatron.contract.words import TrainerLayout
from tio_megatron.integrations.megatron.weights import from_hf
from tio_megatron.testing import RankError, run_ranks

RANKS = {"tp1": 1, "tp2+ep2+sp": 2, "tp2+ep2+sp+allgather": 2, "ep2+dp2": 2, "tp2+etp2": 2, "cp2": 2}


def work_in(folder: Path, device: str) -> main_job.Work:
    makers.make_random(folder, makers.slice_config(1, experts=8, vocab=256) | SMALL_MODEL, 1)
    return main_job.Work(folder, device, "cpu", samples=3, prompt=12, new=6)


def test_the_main_job_leaves_nothing_on_the_host(tmp_path: Path) -> None:
    """Rollout, scoring and training in two rounds, trainer TP 2 EP 2 with sequence parallelism."""
    work = work_in(tmp_path, strict_device.DEVICE)
    rounds, there, _ = run_ranks(2, strict_device.job, "cpu", work, "tp2+ep2+sp", timeout=300, start="spawn")[0]
    assert [one.logdiff for one in rounds] == [(50, 0, 0.0)] * 2
    assert rounds[0].trainer != rounds[1].trainer and len(there) == 36, "negative control: the weights have moved"


@pytest.mark.full
@pytest.mark.parametrize("layout", RANKS)
def test_its_log_probabilities_and_weights_are_the_cpus(tmp_path: Path, layout: str) -> None:
    work = work_in(tmp_path, strict_device.DEVICE)
    rounds, there, _ = run_ranks(RANKS[layout], strict_device.job, "cpu", work, layout, timeout=300, start="spawn")[0]
    assert [one.logdiff for one in rounds] == [(50, 0, 0.0)] * 2
    others, here, _ = run_ranks(1, strict_device.job, "cpu", replace(work, device="cpu"), "tp1", timeout=300, start="spawn")[0]
    assert here == there and [one.trainer for one in others] == [one.trainer for one in rounds]


def with_everything(rank: int, device: str, folder: Path, layout: str) -> tuple[Any, ...]:
    """Packed scores with whole rows at a temperature; a step with recomputation and the auxiliary loss; weights and moments afterwards."""
    if device != "cpu":
        strict_device.install()
    from megatron.core.distributed import finalize_model_grads

    from examples.qwen3_moe import trainer
    from tio_megatron.integrations.megatron.resume.optimizer_state import export_state
    from tio_megatron.integrations.megatron.scoring.logprobs import token_logprobs
    from tio_megatron.integrations.megatron.weights.transfer import export_weights

    more = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01, "finalize_model_grads_func": finalize_model_grads}
    more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with Checkpoint(folder) as checkpoint:
        config = checkpoint.config
    with mock.patch.object(trainer, "transformer_config", lambda *args, **fields: from_hf.transformer_config(*args, **fields | more)):
        one = trainer.Trainer(config, TrainerLayout.parse(layout), Contract(), longest=32, device=device)
    one.load(folder)
    one.train_with(lr=1e-3, clip_grad=0.1)
    sequences = [[i * 7 % 256 for i in range(12)], [i * 5 % 256 for i in range(8)]]
    scores = token_logprobs(one.model, sequences, packed=True, rows=[[3], [4]], temperature=0.7)
    found = one.step(sequences, [[0.1] * 11, [0.2] * 7], size=1)
    assert scores is not None
    held = [*export_weights(one.model, config, destination=None), *export_state(one.model, one.optimizer, config, "exp_avg", destination=None)]
    return [toy.take(x).tolist() for x in scores.logprobs + scores.rows], found, [(name, tensor.float().tolist()) for name, tensor in held]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "layout"), [(1, "tp1"), (2, "tp2+ep2+sp")])
def test_packed_scores_recomputation_and_the_auxiliary_loss(tmp_path: Path, ranks: int, layout: str) -> None:
    work_in(tmp_path, "cpu")
    there, here = (run_ranks(ranks, with_everything, device, tmp_path, layout, timeout=300, start="spawn") for device in (strict_device.DEVICE, "cpu"))
    assert there == here


def with_a_tensor_on_the_host(rank: int) -> None:
    strict_device.install()
    torch.ones(2, device=strict_device.DEVICE) + torch.ones(2)


@pytest.mark.full
def test_a_tensor_that_was_left_on_the_host_is_seen() -> None:
    """Negative control."""
    with pytest.raises(RankError, match=r"aten::add: expected all tensors on toy:0, but torch.float32 \[2\] lie on the host"):
        run_ranks(1, with_a_tensor_on_the_host, timeout=120, start="spawn")

"""Training steps of stock megatron-core (DDP, its Adam, fp32 main parameters) on a model under the contract, on CPU ranks."""

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tiny_megatron import Setup, ddp, losses, on_ranks

from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.testing import assert_same_bytes, first_mismatch
from tio_megatron.testing.qwen3 import DENSE, write_tiny

TOKENS = torch.randint(700, (4, 65), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("training") / "model", DENSE)


def train(setup, steps=3, micro_batches=2, **options):
    """By rank: the losses per token before each step, and the scores and parameters after the last."""

    def work(model, _):
        from megatron.core import parallel_state

        wrapped = ddp(model, **options)
        distributed = options.get("use_distributed_optimizer", False)
        config = OptimizerConfig(optimizer="adam", lr=2e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0, use_distributed_optimizer=distributed)
        optimizer = get_megatron_optimizer(config, [wrapped])
        # What megatron-core's training loop sets, so that the scaled loss is what is differentiated.
        model.config.grad_scale_func = optimizer.scale_loss
        mine = TOKENS.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
        seen = []
        for _ in range(steps):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            seen.append(losses(wrapped, mine.chunk(micro_batches), backward=True, weight=1 / mine[:, 1:].numel()))
            assert optimizer.step()[0]
        scores = token_logprobs(wrapped, TOKENS[:, :20])
        return seen, scores and scores.logprobs, {name: value.detach().clone() for name, value in model.named_parameters()}

    return on_ranks(setup, work)


LAYOUTS = [pytest.param(Layout(), marks=pytest.mark.full), Layout(tp=2, sp=True), Layout(tp=2, pp=2, sp=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_lower_the_loss_and_repeat_to_the_byte(layout, folder):
    setup = Setup(folder, layout, padding=0.0)
    first, second = train(setup), train(setup)
    assert_same_bytes(first, second)
    seen, scores, _ = first[-1]
    assert seen[-1].mean() < seen[0].mean() - 0.5
    assert first_mismatch(-seen[-1][0, :19], scores[0]) is not None, "a step changes the scores"


def test_the_first_loss_is_the_same_in_every_layout(folder):
    """And padding rows that hold NaN spoil no step of any other parameter."""
    runs = [train(Setup(folder, layout), steps=1)[-1] for layout in (Layout(), Layout(tp=2, sp=True))]
    assert_same_bytes(runs[0][0][0], runs[1][0][0])
    for _, scores, parameters in runs:
        assert not any(values.isnan().any() for values in scores)
        assert not any(value.isnan().any() for name, value in parameters.items() if "embed" not in name and "output" not in name)


def test_the_distributed_optimizer_steps(folder):
    setup = Setup(folder, Layout(dp=2), padding=0.0)
    sharded = train(setup, micro_batches=1, use_distributed_optimizer=True, overlap_grad_reduce=True)
    assert_same_bytes(sharded[0][2], sharded[1][2], "both ranks hold the same parameters")
    assert sharded[0][0][-1].mean() < sharded[0][0][0].mean() - 0.5


@pytest.mark.parametrize(
    "fields",
    [
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"]),
    ],
    ids=["full", "selective"],
)
def test_recomputation_changes_no_byte(fields, folder):
    layout = Layout(tp=2, sp=True)
    plain, again = (train(Setup(folder, layout, padding=0.0, fields=f), steps=2) for f in ({}, fields))
    assert_same_bytes(plain, again)

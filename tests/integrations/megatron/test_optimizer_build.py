"""What is taken and what is refused when an optimizer is built, and what a gradient that is not finite does."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hand_made import Row, everything, give, gradients, made, run
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tiny_megatron import running

import tio_megatron as tio
from tio_megatron.integrations.megatron.applied import same_model
from tio_megatron.integrations.megatron.training import optimizer_refusals
from tio_megatron.testing import RankError, assert_same_bytes, run_ranks

BOTH = [torch.bfloat16, torch.float32]


def changed(config, **fields):
    """After megatron-core's own checks, some of which would refuse first."""
    for name, value in fields.items():
        setattr(config, name, value)
    return config


WRONG = dict(
    optimizer="sgd",
    fp16=True,
    loss_scale=1024.0,
    params_dtype=torch.float16,
    fp8_recipe="mxfp8",
    reuse_grad_buf_for_mxfp8_param_ag=True,
    use_precision_aware_optimizer=True,
    main_grads_dtype=torch.bfloat16,
    main_params_dtype=torch.float16,
    exp_avg_dtype=torch.bfloat16,
    exp_avg_sq_dtype=torch.bfloat16,
    optimizer_cpu_offload=True,
    use_torch_optimizer_for_cpu_offload=True,
)
WRONG_DDP = dict(
    use_megatron_fsdp=True,
    use_custom_fsdp=True,
    data_parallel_sharding_strategy="optim",
    num_distributed_optimizer_instances=2,
    reduce_scatter_with_fp32_accumulation=True,
    average_in_collective=True,
    fp8_param_gather=True,
    reuse_grad_buf_for_mxfp8_param_ag=True,
    delay_wgrad_compute=True,
)


@pytest.mark.parametrize("option, value", WRONG.items())
def test_optimizer_options_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=rf"the optimizer cannot obey.*\n  {option}=.*would work"):
        optimizer_refusals.check_optimizer(changed(OptimizerConfig(lr=1e-3), **{option: value}))


@pytest.mark.parametrize("option, value", WRONG_DDP.items())
def test_data_parallel_options_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=rf"data parallelism cannot obey.*\n  {option}=.*would work"):
        optimizer_refusals.check_ddp(changed(DistributedDataParallelConfig(grad_reduce_in_fp32=True), **{option: value}), BOTH)


def test_every_rule_names_an_option_that_exists_and_is_tested():
    for rules, config, wrong in (
        (optimizer_refusals.OPTIMIZER_RULES, OptimizerConfig, WRONG),
        (optimizer_refusals.DDP_RULES, DistributedDataParallelConfig, WRONG_DDP),
    ):
        assert {rule.option for rule in rules} == set(wrong) <= {field.name for field in dataclasses.fields(config)}


def test_what_works_is_not_refused():
    optimizer_refusals.check_optimizer(OptimizerConfig(lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True))
    optimizer_refusals.check_ddp(DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True), [torch.float32])
    with pytest.raises(ValueError, match="grad_reduce_in_fp32=False: gradients would be rounded"):
        optimizer_refusals.check_ddp(DistributedDataParallelConfig(), BOTH)


def test_other_optimizers_are_refused():
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.muon import TensorParallelMuon

    with tio.apply():
        with pytest.raises(ValueError, match="Muon cannot obey the contract.*optimizer='adam' would work"):
            TensorParallelMuon([])
        with pytest.raises(ValueError, match="the layer-wise optimizer cannot obey"):
            LayerWiseDistributedOptimizer([], None)


def test_other_norms_are_refused_and_the_largest_element_stays_stocks():
    from megatron.core.optimizer import optimizer

    def work(rank):
        from tio_megatron.integrations.megatron import cpu_device

        with cpu_device.enabled(), tio.apply():
            with pytest.raises(ValueError, match="norm_type=3"):
                optimizer.get_grad_norm_fp32([torch.ones(3)], 3)
            with pytest.raises(ValueError, match="precision-aware"):
                optimizer.clip_grad_by_total_norm_fp32([], 1.0, 2.0, use_decoupled_grad=True)
            return optimizer.get_grad_norm_fp32([torch.tensor([1.0, -5.0 - rank])], math.inf), optimizer.get_grad_norm_fp32(torch.tensor([3.0, 4.0]))

    assert run_ranks(2, work) == [(6.0, math.sqrt(50.0))] * 2


def build(rank, row, options):
    with running(row.setup):
        made(row, **options)


def test_a_refused_option_reaches_the_user():
    with pytest.raises(RankError, match="ValueError: the optimizer cannot obey the contract with these options:\n  optimizer='sgd'"):
        run_ranks(1, build, Row(), {"optimizer": "sgd"})


def test_an_optimizer_built_outside_the_contract_does_not_step():
    row = Row(dtype="float32")

    def work(rank):
        with running(row.setup):
            model, _ = made(row)
            tio.undo()
            theirs = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
            with tio.apply(vocab_size=700):
                give(model, gradients(0, row.dtype))
                theirs.step()

    with pytest.raises(RankError, match=r"built outside tio_megatron.apply\(\): its steps are torch"):
        run_ranks(1, work)


def test_a_package_on_one_rank_is_named(tmp_path):
    """A stand-in for apex that only rank 1 can import."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")

    def work(rank):
        if rank == 1:
            sys.path.insert(0, str(tmp_path))
        build(rank, Row(dp=2), {})

    with pytest.raises(RankError, match=r"\n  rank 1 .*other packages than elsewhere \(more: apex without a version; fewer: none\)"):
        run_ranks(2, work)


def test_ranks_whose_models_differ_are_named():
    """The values of the configuration as it is when the optimizer is built; names of layouts and callables are no numbers."""

    def work(rank):
        config = dataclasses.make_dataclass("Config", [("layernorm_epsilon", float), ("params_dtype", object), ("init_method", object)])
        mine = config(1e-6 if rank != 2 else 1e-5, torch.bfloat16 if rank != 1 else torch.float32, lambda: rank)
        with pytest.raises(ValueError) as caught:
            same_model.require(mine)
        return str(caught.value)

    (said,) = set(run_ranks(3, work))
    assert said.splitlines() == [
        "ranks run different models, so their numbers would differ:",
        "  rank 2: model's layernorm_epsilon is 1e-05, elsewhere 1e-06",
        "  rank 1: model's params_dtype is torch.float32, elsewhere torch.bfloat16",
    ]


def poisoned(rank, row):
    """(successful, norm, everything before and after) of steps in which one gradient element of one expert is infinite, then NaN; a good step."""
    with running(row.setup):
        model, optimizer = made(row)
        skipped = []
        for value in (math.inf, math.nan):
            whole = dict(gradients(0, row.dtype))
            name = next(name for name in whole if ".experts.3." in name)
            whole[name] = whole[name].clone()
            whole[name][5, 5] = value
            before = everything(model, optimizer, row)
            give(model, whole)
            skipped.append((*optimizer.step()[:2], before, everything(model, optimizer, row)))
        give(model, gradients(0, row.dtype))
        return skipped, optimizer.step()[0]


@pytest.mark.parametrize("row", [Row(tp=2, ep=2), Row(ep=2, dp=2, sharded=True)], ids=str)
def test_no_rank_steps_on_a_gradient_that_is_not_finite(row):
    for skipped, then in run_ranks(row.world, poisoned, row, timeout=120):
        for (done, norm, before, after), expected in zip(skipped, (math.inf, math.nan), strict=True):
            assert not done
            assert_same_bytes(norm, expected)
            assert_same_bytes(after, before, "the skipped step")
        assert then, "the next step is taken"


STAND_IN = Path(__file__).with_name("apex_stand_in.py")


@pytest.mark.full
def test_nothing_of_an_importable_apex_is_called(tmp_path):
    """With its control: stock takes Adam, the norm, the scaling, the softmax's block size and the accumulation of weight gradients from there."""
    done = subprocess.run([sys.executable, "-W", "ignore", str(STAND_IN), str(tmp_path)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    called = {path.name: set(path.read_text().split()) for path in tmp_path.iterdir() if path.suffix == "" and path.is_file()}
    adam, norms = {"FusedAdam", "FusedAdam.step", "multi_tensor_applier"}, {"FusedLayerNormAffineFunction", "FastLayerNormFN"}
    assert called == {"stock": {*adam, *norms, "scaled_masked_softmax", "wgrad_gemm_accum_fp32"}}


def test_clipping_is_one_product():
    """The norm and a coefficient rounded once: the clipped step is the step on gradients multiplied beforehand."""
    norms, found = run(Row(dtype="float32"), steps=1, clip_grad=1.0)
    coefficient = torch.tensor(1.0 / (norms[0] + 1e-6), dtype=torch.float32)
    new = torch.tensor(1.0 - 0.9)
    assert_same_bytes(found["exp_avg"], {name: new * (gradient * coefficient) for name, gradient in gradients(0, "float32").items()})

"""The expert modules as parts of Megatron: options refused by name, undo, checkpoints, recompute, the same bytes run after run."""

import contextlib
import dataclasses
import functools

import moe_models as models
import moe_world as world
import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from tiny_megatron import build, running

import tio_megatron as tio
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract, Cuts
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.applied.moe_refusals import moe_refusals
from tio_megatron.integrations.megatron.modules.expert_layer import OrderedMoELayer
from tio_megatron.integrations.megatron.modules.expert_spec import moe_spec
from tio_megatron.testing import RankError, assert_same_bytes, first_mismatch, run_ranks

REFUSED = [
    ("moe_router_load_balancing_type", "sinkhorn"),
    ("moe_router_load_balancing_type", ["seq_aux_loss", "sinkhorn"]),
    ("moe_aux_loss_coeff", [0.0, 0.01]),
    ("moe_z_loss_coeff", 1e-3),
    ("moe_input_jitter_eps", 0.1),
    ("moe_router_force_load_balancing", True),
    ("moe_router_num_groups", 4),
    ("moe_router_group_topk", 2),
    ("moe_router_score_function", "sigmoid"),
    ("moe_router_topk_scaling_factor", 2.5),
    ("moe_router_enable_expert_bias", True),
    ("moe_router_dtype", "fp64"),
    ("moe_router_fusion", True),
    ("moe_permute_fusion", True),
    ("moe_router_padding_for_quantization", True),
    ("moe_enable_routing_replay", True),
    ("moe_expert_capacity_factor", 1.0),
    ("moe_pad_expert_input_to_capacity", True),
    ("moe_token_dropping", True),
    ("moe_token_dispatcher_type", "flex"),
    ("moe_enable_deepep", True),
    ("moe_apply_probs_on_input", True),
    ("moe_latent_size", 64),
    ("moe_use_legacy_grouped_gemm", True),
    ("moe_shared_expert_overlap", True),
    ("overlap_moe_expert_parallel_comm", True),
    ("delay_wgrad_compute", True),
    ("add_bias_linear", True),
    ("gated_linear_unit", False),
    ("activation_func", F.gelu),
    ("activation_func_clamp_value", 7.0),
    ("glu_linear_offset", 1.0),
]


@pytest.mark.parametrize("name, value", REFUSED, ids=lambda v: v if isinstance(v, str) else None)
def test_an_option_that_would_change_a_sum_is_refused_by_name(name, value):
    config = world.config(world.Row())
    assert moe_refusals(config) == []
    setattr(config, name, value)
    lines = [*map(str, moe_refusals(config))]
    assert len(lines) == 1 and lines[0].startswith(f"{name}="), lines
    spec = get_moe_module_spec(use_te=False, num_experts=16)
    with pytest.raises(ValueError, match=f"cannot obey the contract with these options:\n  {name}="):
        moe_spec(spec, config)
    with pytest.raises(ValueError, match=name):
        OrderedMoELayer(config)


@pytest.mark.parametrize(
    "kind, coefficient, line",
    [
        ("aux_loss", 0.01, "moe_router_load_balancing_type='aux_loss': the value of aux_loss depends on the micro-batch; 'seq_aux_loss', or moe_aux_loss"),
        ("global_aux_loss", 0.01, "moe_router_load_balancing_type='global_aux_loss': global_aux_loss is not in the contract; 'seq_aux_loss'"),
        (["seq_aux_loss", "global_aux_loss"], [0.01, 0.01], "moe_router_load_balancing_type=['seq_aux_loss', 'global_aux_loss']: global_aux_loss"),
        (["seq_aux_loss", "aux_loss"], 0.01, "moe_aux_loss_coeff=0.01: it must be one number for each of ['seq_aux_loss', 'aux_loss']"),
        ("seq_aux_loss", -0.01, "moe_aux_loss_coeff=-0.01: it must be a positive number"),
        ("seq_aux_loss", float("nan"), "moe_aux_loss_coeff=nan: it must be a positive number"),
        ("seq_aux_loss", 0.01, None),
        (["seq_aux_loss", "aux_loss"], [0.01, 0.0], None),
        ("aux_loss", 0.0, None),
        ("none", 0.01, None),
    ],
)
def test_only_the_loss_of_whole_samples_is_served(kind, coefficient, line):
    config = world.config(world.Row(), calculate_per_token_loss=True)
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = kind, coefficient
    lines = [*map(str, moe_refusals(config))]
    assert not lines if line is None else len(lines) == 1 and lines[0].startswith(line), lines


def test_an_auxiliary_loss_is_added_to_losses_summed_over_tokens():
    config = world.config(world.Row(), moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01)
    assert str(moe_refusals(config)[0]).endswith("calculate_per_token_loss=True would work")


def test_an_auxiliary_loss_must_know_its_samples():
    row = world.Row()
    fields = dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01, calculate_per_token_loss=True)
    p = world.problem(row)
    with pytest.raises(RankError, match="run the layer inside its model"):
        world.run(row, lambda rank: world.step(world.build(row, **fields), row, p.x, p.dout))


def test_a_gate_on_shared_experts_is_refused():
    config = world.config(world.Row(), moe_shared_expert_intermediate_size=64, moe_shared_expert_gate=True)
    assert str(moe_refusals(config)[0]).startswith("moe_shared_expert_gate=True")


def test_recomputing_the_activation_alone_is_refused():
    config = world.config(world.Row(grouped=True), recompute_granularity="selective", recompute_modules=["moe_act"])
    assert str(moe_refusals(config)[0]).startswith("recompute_modules='moe_act'")


def test_unknown_experts_are_refused():
    spec = get_moe_module_spec(use_te=False, num_experts=16)
    spec.submodules.experts = ModuleSpec(module=torch.nn.Linear)
    with pytest.raises(ValueError, match="Linear.* is not a module we can replace"):
        moe_spec(spec, world.config(world.Row()))


@pytest.mark.parametrize("place, says", [("experts", r"params of experts \(gate\)"), ("shared_experts", r"params of shared_experts \(gate\)")])
def test_parameters_that_would_be_dropped_are_refused(place, says):
    spec = get_moe_module_spec(use_te=False, num_experts=16, moe_grouped_gemm=False)
    getattr(spec.submodules, place).params = {"gate": True}
    with pytest.raises(ValueError, match=says):
        moe_spec(spec, world.config(world.Row()))


def test_a_width_off_the_leaves_is_refused_with_what_works():
    row = world.Row(etp=2, tp=2)

    def work(rank):
        cpu_device.enable()
        layer = None
        with world.session(Contract(cuts=Cuts(expert_row=1))):
            layer = world.build(row)
            world.step(layer, row, world.problem(row).x)

    with pytest.raises(RankError, match=r"experts.linear_fc2: cut into 2 parts, but cuts.expert_row = 1 leaves.*or cuts.expert_row = 2"):
        run_ranks(2, work)


def test_outside_a_contract_nothing_runs():
    row = world.Row()

    def work(rank):
        cpu_device.enable()
        with world.session():
            layer = world.build(row)
        world.step(layer, row, world.problem(row).x)

    with pytest.raises(RankError, match="no contract is applied"):
        run_ranks(1, work)


def test_the_stock_spec_is_left_as_it_was():
    spec = get_gpt_layer_local_spec(num_experts=16, moe_grouped_gemm=False).submodules.mlp
    before = spec.module, spec.submodules.router, spec.submodules.experts.module, spec.submodules.shared_experts.module
    ours = moe_spec(spec, world.config(world.Row()))
    assert ours.module is OrderedMoELayer and spec.module is MoELayer and spec.submodules.router is TopKRouter
    assert before == (spec.module, spec.submodules.router, spec.submodules.experts.module, spec.submodules.shared_experts.module)


def test_after_undo_a_stock_model_is_stock():
    """A stock model gives the same log-probabilities before ``apply()`` and after ``undo()``, and not ours."""
    row = models.Row(grouped=False)

    def work(rank):
        ids = torch.tensor(models.SEQUENCES[0])[None]
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
        stock = dataclasses.replace(row.setup(), ordered=False, padding=0.0)
        found = []
        with running(stock), Checkpoint(stock.path) as checkpoint, torch.no_grad():
            model = build(stock, checkpoint)
            for enter in (contextlib.nullcontext, functools.partial(tio.apply, vocab_size=700), contextlib.nullcontext):
                with enter() as applied:
                    used = build(row.setup(), checkpoint) if applied else model
                    found.append(used(ids, torch.arange(ids.shape[1])[None], mask)[0, :, :700].float())
        return found

    before, ours, after = run_ranks(1, work, timeout=120)[0]
    assert_same_bytes(before, after, "stock")
    assert first_mismatch(before, ours) is not None


@pytest.mark.parametrize("apart", [False, True])
def test_both_kinds_of_experts_save_under_the_same_keys(apart):
    """Keys, global shapes and offsets of a distributed checkpoint are stock's SequentialMLP's, whichever kind of experts wrote it."""
    row = world.Row(tp=2, ep=2, etp=2)

    def work(rank):
        found = []
        for grouped in (True, False):
            layer = world.build(dataclasses.replace(row, grouped=grouped))
            metadata = {"singleton_local_shards": apart, "dp_cp_group": ProcessGroupCollection.use_mpu_process_groups().dp_cp}
            flat = {}
            for value in layer.experts.sharded_state_dict("experts.", metadata=metadata).values():
                for part in value.build() if hasattr(value, "build") else [value]:
                    offsets = getattr(part, "global_offset", None)
                    flat[part.key, offsets] = (part.global_shape, part.replica_id, getattr(part, "data", None))
            found.append(flat)
        return found

    for grouped, sequential in world.run(row, work):
        assert {k: v[:2] for k, v in grouped.items()} == {k: v[:2] for k, v in sequential.items()}
        for key, (_, _, data) in grouped.items():
            if isinstance(data, torch.Tensor):
                assert_same_bytes(data.detach(), sequential[key][2].detach(), str(key))


@pytest.mark.parametrize("fields", [dict(recompute_granularity="selective", recompute_modules=["moe"])], ids=["moe"])
def test_recompute_gives_the_same_bytes(fields):
    row = world.Row(tp=2, ep=2, way="allgather")
    p = world.problem(row)
    results = world.run(row, lambda rank: world.step(world.build(row, **fields), row, p.x, p.dout))
    for name in ("out", "dx"):
        assert_same_bytes(world.gather(results, name), world.alone(row)[name], name)


@functools.cache
def trained(row):
    return run_ranks(row.world, models.train, row, 2, timeout=240)


def assert_trained_alike(a, b):
    """Losses, gradients and weights of two runs."""
    assert [loss for loss, *_ in a] == [loss for loss, *_ in b]
    for what, ours, theirs in zip(("gradient", "weight"), a[0][1:], b[0][1:], strict=True):
        for name in theirs:
            assert_same_bytes(ours[name], theirs[name], f"{what} {name}")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_training_gives_the_same_bytes_run_after_run(dtype):
    """Two optimizer steps under DDP, twice; every expert learns."""
    row = models.Row(tp=2, ep=2, dtype=dtype)
    first = trained(row)
    assert_trained_alike(run_ranks(2, models.train, row, 2, timeout=240), first)
    before = models.weights(row)
    assert all((first[0][2][name] != value).any() for name, value in before.items() if "experts" in name)


@pytest.mark.parametrize(
    "distributed, fields",
    [
        pytest.param(True, (), id="distributed optimizer"),
        pytest.param(
            False,
            (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1)),
            id="full recompute",
            marks=pytest.mark.full,
        ),
        pytest.param(
            False, (("recompute_granularity", "selective"), ("recompute_modules", ("moe",))), id="recompute of the expert layer", marks=pytest.mark.full
        ),
    ],
)
def test_how_it_is_trained_changes_no_byte(distributed, fields):
    row = models.Row(tp=2, ep=2)
    assert_trained_alike(run_ranks(2, models.train, row, 2, distributed, fields, timeout=240), trained(row))

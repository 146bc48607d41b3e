"""What is not covered is refused when an engine is built, by its name, with what would work. Needs DeepSpeed: make test-deepspeed."""

import copy
import re

import pytest

pytest.importorskip("deepspeed", reason="NOT RUN: deepspeed is not installed here: make test-deepspeed")

import deepspeed
import torch
from deepspeed_runs import HIDDEN, ROWS_AND_COLUMNS, Dense, Layout, Model, batches, build, configuration, here, initialize
from torch import nn

import tio_megatron as tio
from tio_megatron.testing import run_ranks

CONFIGURATIONS = {
    "ZeRO-3": (
        {"zero_optimization": {"stage": 3}},
        "zero_optimization_stage=3: ZeRO-3 gathers and reduces inside the layers, in DeepSpeed's order; 0 or 1 or 2",
    ),
    "fp16": ({"fp16": {"enabled": True}}, "fp16_enabled=True: loss scaling is not in the contract"),
    "bf16 with ZeRO-0": ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}, "stage=0 with bf16.*stage 1 would work"),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast_enabled=True"),
    "offload": ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer.device='cpu': .*'none' would work"),
    "prescale": ({"prescale_gradients": True}, "postscale_gradients=False: .*prescale_gradients: false"),
    "predivide": ({"zero_optimization": {"stage": 1}, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0"),
    "sum": ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op='sum'.*'mean' would work"),
    "round robin": ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "zero_round_robin_gradients=True"),
    "own boundary": ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation=False"),
    "hybrid engine": ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled=True"),
    "OneBitAdam": ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "optimizer.type='OneBitAdam': no other optimizer"),
    "SGD": (
        {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}},
        "optimizer.type='SGD': no other optimizer than Adam has a kernel; 'AdamW' or 'Adam' would work",
    ),
    "amsgrad": ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}}}, "optimizer.params.amsgrad=True"),
    "quantized gradients": ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "zero_quantized_gradients=True"),
}
"""Name: what the configuration holds besides, and what the error says."""

GATES = {
    "capacity": ({"drop_tokens": True}, "drop_tokens=True: which tokens an expert keeps depends on its rank"),
    "drawn second expert": ({"k": 2, "top2_2nd_expert_sampling": True}, "top2_2nd_expert_sampling=True.*False would work"),
    "noise": ({"noisy_gate_policy": "Jitter"}, "noisy_gate_policy='Jitter'"),
    "residual": ({"use_residual": True}, "use_residual=True"),
}


def said(act):
    """The error's text."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  (DeepSpeed's own refusals have many classes)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def with_moe(**options):
    model = Model(Layout())
    settings = {"drop_tokens": False, "top2_2nd_expert_sampling": False} | options
    model.layers[0].mlp = deepspeed.moe.layer.MoE(HIDDEN, Dense(), num_experts=2, **settings)
    return model


def with_dropout():
    model = Model(Layout())
    model.drop = nn.Dropout(0.1)
    return model


def with_batch_norm():
    model = Model(Layout())
    model.layers[0].norm = nn.BatchNorm1d(HIDDEN)
    return model


def with_sparse():
    model = Model(Layout())
    model.embed.sparse = True
    return model


MODELS = {
    "dropout": (with_dropout, "drop: dropout 0.1: its random numbers depend on the rank; 0.0 would work"),
    "batch norm": (with_batch_norm, r"layers.0.norm: BatchNorm1d mixes the samples"),
    "sparse gradients": (with_sparse, "embed: sparse gradients"),
}


def configurations(rank):
    here(rank, 1)
    tio.apply()
    found = {}
    for name, (more, _) in CONFIGURATIONS.items():
        config = copy.deepcopy(configuration(Layout()))
        config.pop("gradient_clipping")
        found[name] = said(lambda config=config, more=more: deepspeed.initialize(model=Model(Layout()), config=config | more))
    config = configuration(Layout())
    for name, (options, _) in GATES.items():
        found[name] = said(lambda options=options: deepspeed.initialize(model=with_moe(**options), config=config))
    for name, (make, _) in MODELS.items():
        found[name] = said(lambda make=make: deepspeed.initialize(model=make(), config=config))
    model = Model(Layout())
    client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = {key: value for key, value in config.items() if key != "optimizer"}
    found["client"] = said(lambda: deepspeed.initialize(model=model, optimizer=client, config=plain))
    found["pipeline"] = said(
        lambda: deepspeed.initialize(model=deepspeed.pipe.PipelineModule([nn.Linear(8, 8)], num_stages=1, loss_fn=nn.MSELoss()), config=config)
    )
    found["kernels"] = said(lambda: deepspeed.init_inference(Model(Layout()), dtype=torch.float32, replace_with_kernel_inject=True))
    found["half"] = said(lambda: deepspeed.init_inference(Model(Layout()), dtype=torch.float16))
    return found


@pytest.fixture(scope="module")
def answers():
    return run_ranks(1, configurations, timeout=300)[0]


@pytest.mark.parametrize("name", [*CONFIGURATIONS, *GATES, *MODELS])
def test_refused(name, answers):
    _, expected = (CONFIGURATIONS | GATES | MODELS)[name]
    assert re.search(expected, answers[name], re.DOTALL), answers[name]
    assert answers[name].startswith("ValueError"), answers[name]


def test_an_optimizer_of_one_s_own_is_refused(answers):
    assert "optimizer=torch.optim.adamw.AdamW" in answers["client"] and "{'type': 'AdamW'} in the configuration would work" in answers["client"]


def test_the_pipeline_engine_is_refused(answers):
    assert "PipelineModule: the pipeline engine sums losses and tied weights itself" in answers["pipeline"]


def test_fused_inference_is_refused(answers):
    assert "replace_with_kernel_inject=True: fused kernels have their own orders; False would work" in answers["kernels"]
    assert "dtype=torch.float16: only these element types have kernels" in answers["half"]


def uses(rank):
    """Ways to run an engine that nobody would count."""
    engine, model = initialize(rank, Layout(stage=1))
    batch = batches(1)[0, 0]

    def loss():
        return engine(batch[:, :-1]).sum()

    found = {"scaled": said(lambda: engine.backward(loss(), scale_wrt_gas=False)), "no_sync": said(lambda: engine.no_sync().__enter__())}
    found["compiled"] = said(lambda: engine.compile())
    found["torch style"] = said(lambda: loss().backward())
    engine.set_gradient_accumulation_boundary(True)
    found["boundary"] = said(lambda: engine.backward(loss()))
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(3):
        engine.backward(loss())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.set_gradient_accumulation_boundary(True)
    found["nan"] = said(lambda: _nan(engine, loss))
    found["changed"] = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    return found


def _nan(engine, loss):
    try:
        engine.backward(loss() * float("nan"))
    except ArithmeticError as error:
        raise ValueError(str(error)) from error


def test_uses_that_are_not_covered():
    found = run_ranks(1, uses, timeout=200)[0]
    assert "scale_wrt_gas=False is for losses that are divided already" in found["scaled"]
    assert "gradient_accumulation_steps in the configuration would work" in found["no_sync"]
    assert "running without it would work" in found["compiled"]
    assert "call engine.backward(loss), which counts micro-batches" in found["torch style"]
    assert "1 backward passes since the last step, and gradient_accumulation_steps says 4" in found["boundary"]
    assert "NaN or infinite" in found["nan"] and "Nothing was changed" in found["nan"] and found["changed"] == []


CUTS = {
    "uneven": (
        {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": [{"patterns": [".*odd\\.weight$"], "partition_type": "row"}]}},
        "cut unevenly",
    ),
    "shaped": (
        {
            "autotp_size": 2,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [{"patterns": [".*up_proj\\.weight$"], "partition_type": "column", "shape": [2, -1]}],
            },
        },
        "is a SubParamLinearLayer",
    ),
    "vocabulary": ({"autotp_size": 2, "vocab_parallel_lm_head": True, "partition_config": ROWS_AND_COLUMNS}, "tensor_parallel.vocab_parallel_lm_head=True"),
}


class Odd(Model):
    """A head of 36 outputs and a linear of 36 inputs: no leaf ends in the middle of it."""

    def __init__(self):
        super().__init__(Layout())
        self.odd = nn.Linear(35, 16)


class Leafless(Model):
    """36 inputs do not divide into 8 leaves."""

    def __init__(self):
        super().__init__(Layout())
        self.odd = nn.Linear(36, 16)


def cuts(rank):
    here(rank, 2)
    tio.apply()
    found = {}
    for name, (section, _) in CUTS.items():
        config = configuration(Layout(world=2)) | {"tensor_parallel": section}
        found[name] = said(lambda config=config, name=name: deepspeed.initialize(model=Odd() if name == "uneven" else build(rank, Layout()), config=config))
    config = configuration(Layout(world=2)) | {"tensor_parallel": CUTS["uneven"][0]}
    found["leaves"] = said(lambda: deepspeed.initialize(model=Leafless(), config=config))
    return found | {name: said(lambda change=change: beside(rank, **change)) for name, (change, _) in BESIDE.items()}


def router_too(config):
    config["tensor_parallel"]["partition_config"] = copy.deepcopy(ROWS_AND_COLUMNS)
    config["tensor_parallel"]["partition_config"]["layer_specs"].append({"patterns": [".*gate\\.wg\\.weight$"], "partition_type": "column"})


def experts_too(config):
    config["tensor_parallel"]["partition_config"] = ROWS_AND_COLUMNS


def summed(config):
    config["tensor_parallel"]["partition_config"] = copy.deepcopy(ROWS_AND_COLUMNS)
    skip = {"patterns": [".*deepspeed_experts.*norm\\.weight$"], "partition_type": "skip", "grad_allreduce": True}
    config["tensor_parallel"]["partition_config"]["layer_specs"].insert(0, skip)


def strided(config):
    config["use_data_before_expert_parallelism"] = True


BESIDE = {
    "router": ({"change": router_too, "cut": True}, "layers.0.mlp.moe: AutoTP cut the router (gate.wg)"),
    "whole experts": (
        {"change": experts_too},
        "AutoTP cut the experts (deepspeed_experts.0.up_proj), whose ranks see other tokens: enable_expert",
    ),
    "sum of a norm": ({"change": summed, "cut": True}, "grad_allreduce on an expert's deepspeed_experts.0.norm.weight"),
    "order of groups": ({"change": strided}, "use_data_before_expert_parallelism under tensor parallelism"),
    "width": ({"cut": True, "width": 64}, "AutoTP cut an expert's deepspeed_experts.0.up_proj to 32 outputs"),
    "ep_size": ({"ep": 3}, "ep_size=3 under tensor parallelism of 2: an expert-parallel group would hold some of the ranks"),
    # Last: engines whose groups stay.
    "checkpoint": ({"save": True}, "save_checkpoint with layers.0.mlp.moe: ep_size=1 and enable_expert_tensor_parallelism=False"),
    "groups": ({"then": True}, "enable_expert_tensor_parallelism=True needs the expert-parallel ranks"),
}
"""An MoE layer beside tensor parallelism of 2: what is done, and what the error says."""


def beside(rank, change=None, save=False, then=False, width=0, **layout):
    layout = Layout(world=2, tp=2, **({"ep": 1} | layout))
    config = configuration(layout)
    if change:
        change(config)
    model = build(rank, layout._replace(ep=1))
    for block in model.layers:
        block.mlp.moe.ep_size = layout.ep
        if width:
            block.mlp.moe = deepspeed.moe.layer.MoE(HIDDEN, Dense(width), num_experts=2, enable_expert_tensor_parallelism=True, drop_tokens=False)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if save:
        engine.save_checkpoint("never")
    if then:
        engine.destroy()
        layout = layout._replace(cut=True)
        deepspeed.initialize(model=build(rank, layout), config=configuration(layout))


def test_cuts_that_have_no_order():
    for found in run_ranks(2, cuts, timeout=200):
        for name, (_, expected) in CUTS.items():
            assert expected in found[name], found[name]
        assert "odd: 36 terms do not divide into cuts.mlp_row = 8 equal leaves" in found["leaves"], found["leaves"]
        for name, (_, expected) in BESIDE.items():
            assert expected in found[name], found[name]

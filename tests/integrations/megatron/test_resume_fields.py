"""A run is resumed with the options that decide its bytes, or refused with the option and both values; options that only cut the work may differ."""

import dataclasses
import re

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import tio_megatron
from tio_megatron.checkpoint import CheckpointConfig, CheckpointError
from tio_megatron.contract import Contract, Layout
from tio_megatron.integrations.megatron import cpu_device, finalize_weighted_grads
from tio_megatron.integrations.megatron.resume.train_state import load_training, save_training
from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE

SMALL = MOE | dict(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32, vocab_size=128)
SMALL |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
AUX = dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.05)
WSD = dict(lr_decay_style="WSD", wsd_decay_steps=4, lr_wsd_decay_style="linear")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is built with beside the defaults: ``hf`` of the checkpoint's configuration, the others of megatron-core's."""

    hf: dict = dataclasses.field(default_factory=dict)
    model: dict = dataclasses.field(default_factory=dict)
    ddp: dict = dataclasses.field(default_factory=dict)
    optimizer: dict = dataclasses.field(default_factory=dict)
    overrides: dict | None = None
    schedule: dict | None = dataclasses.field(default_factory=dict)


def options(**fields):
    return Options(**fields)


REFUSED = {
    "no auxiliary loss": (options(model=AUX), options(), "training.moe_aux_loss_coeff: 0.0 / 0.05"),
    "an auxiliary loss": (options(), options(model=AUX), "training.moe_aux_loss_coeff: 0.05 / 0.0"),
    "its coefficient": (options(model=AUX), options(model=AUX | {"moe_aux_loss_coeff": 0.01}), "training.moe_aux_loss_coeff: 0.01 / 0.05"),
    "weighted losses": (
        options(),
        options(model=dict(finalize_model_grads_func=finalize_weighted_grads)),
        "training.finalize_model_grads_func: finalize_weighted_grads / finalize_model_grads",
    ),
    "norms": (options(), options(hf=dict(rms_norm_eps=1e-5)), "model.rms_eps: 1e-05 / 1e-06"),
    "rotary base": (options(), options(hf=dict(rope_theta=5e5)), r"model.rope_theta: 500000.0 / 1000000.0"),
    "top-k": (options(), options(hf=dict(num_experts_per_tok=3)), "model.top_k: 3 / 2"),
    "normalised experts": (options(), options(hf=dict(norm_topk_prob=False)), "model.normalise: False / True"),
    "dtype": (options(), options(hf=dict(torch_dtype="float32")), "model.dtype: float32 / bfloat16"),
    "softmax": (options(), options(model=dict(softmax_scale=0.5)), r"model.softmax_scale: 0.5 / 0.17677"),
    "beta1": (options(), options(optimizer=dict(adam_beta1=0.8)), r"optimizer.betas: \[0.8, 0.999\] / \[0.9, 0.999\]"),
    "beta2": (options(), options(optimizer=dict(adam_beta2=0.95)), r"optimizer.betas: \[0.9, 0.95\] / \[0.9, 0.999\]"),
    "eps": (options(), options(optimizer=dict(adam_eps=1e-6)), "optimizer.eps: 1e-06 / 1e-08"),
    "clipping": (options(), options(optimizer=dict(clip_grad=0.5)), "optimizer.clip_grad: 0.5 / 1.0"),
    "coupled decay": (options(), options(optimizer=dict(decoupled_weight_decay=False)), "optimizer.adam_w_mode: False / True"),
    "decay of norms of heads": (
        options(),
        options(optimizer=dict(apply_wd_to_qk_layernorm=True)),
        "optimizer.wd_mult: 1.0 / 0.0 of model.layers.0.self_attn.k_norm.weight",
    ),
    "decay of all": (options(), options(overrides={}), "optimizer.wd_mult: 1.0 / 0.0 of model.layers.0.input_layernorm.weight"),
    "groups' own rate": (options(), options(optimizer=dict(lr=1e-2)), "optimizer.max_lr: 0.01 / None"),
    "groups' own last rate": (options(), options(optimizer=dict(min_lr=1e-6)), "optimizer.min_lr: 1e-06 / None"),
    "highest rate": (options(), options(schedule=dict(max_lr=1e-2)), "schedule.max_lr: 0.01 / 0.002"),
    "lowest rate": (options(), options(schedule=dict(min_lr=1e-6)), "schedule.min_lr: 1e-06 / 0.0002"),
    "first rate": (options(), options(schedule=dict(init_lr=1e-5)), "schedule.init_lr: 1e-05 / 0.0"),
    "warm-up": (options(), options(schedule=dict(lr_warmup_steps=3)), "schedule.lr_warmup_steps: 3 / 2"),
    "steps": (options(), options(schedule=dict(lr_decay_steps=20)), "schedule.lr_decay_steps: 20 / 10"),
    "style": (options(), options(schedule=dict(lr_decay_style="linear")), "schedule.lr_decay_style: linear / cosine"),
    "WSD's steps": (options(schedule=WSD), options(schedule=WSD | {"wsd_decay_steps": 5}), "schedule.wsd_decay_steps: 5 / 4"),
    "WSD's style": (options(schedule=WSD), options(schedule=WSD | {"lr_wsd_decay_style": "cosine"}), "schedule.lr_wsd_decay_style: cosine / linear"),
    "decay": (options(), options(schedule=dict(start_wd=0.2, end_wd=0.2)), "schedule.start_wd: 0.2 / 0.1; schedule.end_wd: 0.2 / 0.1"),
    "growth of decay": (options(), options(schedule=dict(wd_incr_style="linear", wd_incr_steps=9)), "schedule.wd_incr_style: linear / constant"),
    "a schedule": (options(), options(schedule=None), "saved with a schedule"),
    "rate without one": (options(schedule=None), options(schedule=None, optimizer=dict(lr=1e-2)), "optimizer.lr: 0.01 / 0.002"),
    "decay without one": (options(schedule=None), options(schedule=None, optimizer=dict(weight_decay=0.2)), "optimizer.weight_decay: 0.2 / 0.1"),
}
ACCEPTED = {
    "the same": options(),
    "recomputation": options(model=dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
    "dispatcher": options(model=dict(moe_token_dispatcher_type="allgather")),
    "grouped experts": options(model=dict(moe_grouped_gemm=True)),
    "a loss of weight 0": options(model=AUX | {"moe_aux_loss_coeff": 0.0}),
    "first weights": options(model=dict(init_method_std=0.5)),
    "overlap": options(ddp=dict(overlap_grad_reduce=True)),
    "sharded optimizer": options(ddp=dict(use_distributed_optimizer=True), optimizer=dict(use_distributed_optimizer=True)),
    "decay of the optimizer under a schedule": options(optimizer=dict(weight_decay=0.7)),
    "longer sequences": options(hf=dict(max_position_embeddings=64)),
}


def built(with_):
    """(model, optimizer, schedule, configuration)."""
    config = CheckpointConfig.from_dict(SMALL | with_.hf)
    fields = dict(perform_initialization=True, calculate_per_token_loss=True, finalize_model_grads_func=finalize_model_grads)
    megatron = transformer_config(config, Layout(), **fields | with_.model)
    bare = gpt_model(config, megatron, vocab_size=padded_vocab(config, Layout()))
    model = DistributedDataParallel(megatron, DistributedDataParallelConfig(**dict(grad_reduce_in_fp32=True) | with_.ddp), bare)
    numbers = dict(optimizer="adam", lr=2e-3, min_lr=2e-4, weight_decay=0.1, bf16=megatron.bf16, params_dtype=megatron.params_dtype)
    optimizer = get_megatron_optimizer(OptimizerConfig(**numbers | with_.optimizer), [model], config_overrides=with_.overrides)
    if with_.schedule is None:
        return model, optimizer, None, config
    rates = dict(init_lr=0.0, max_lr=2e-3, min_lr=2e-4, lr_warmup_steps=2, lr_decay_steps=10, lr_decay_style="cosine")
    rates |= dict(start_wd=0.1, end_wd=0.1, wd_incr_steps=10, wd_incr_style="constant")
    return model, optimizer, OptimizerParamScheduler(optimizer, **rates | with_.schedule), config


def values(model, optimizer):
    """Everything a load would change, as bytes."""
    tensors = [*model.parameters(), *(main for group in optimizer.param_groups for main in group["params"])]
    numbers = [(group["lr"], group["weight_decay"], group["step"]) for group in optimizer.param_groups]
    return [t.detach().view(torch.uint8).numpy().tobytes() for t in tensors], numbers, [p.tio_sum.largest for p in model.parameters()]


def said_of(pairs, root):
    """What loading says in each row: written with the first options, loaded with the second."""
    cpu_device.enable()
    with tio_megatron.apply(Contract(grain=32), vocab_size=SMALL["vocab_size"]):
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        folders, said = {}, []
        for first, second in pairs:
            if repr(first) not in folders:
                folders[repr(first)] = save_training(root / str(len(folders)), *built(first), step=0)
            arguments = built(second)
            before = values(*arguments[:2])
            try:
                load_training(folders[repr(first)], *arguments)
                said.append("")
            except CheckpointError as error:
                said.append(str(error))
                assert values(*arguments[:2]) == before
        parallel_state.destroy_model_parallel()
    return said


def on_a_rank(rank, pairs, root):
    return said_of(pairs, root)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Of every row, in one process."""
    pairs = [(first, second) for first, second, _ in REFUSED.values()] + [(options(), second) for second in ACCEPTED.values()]
    (found,) = run_ranks(1, on_a_rank, pairs, tmp_path_factory.mktemp("rows"), timeout=300)
    return dict(zip([*REFUSED, *ACCEPTED], found, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_another_option_is_refused_with_both_values(said, name):
    assert re.search(REFUSED[name][2], said[name]), said[name] or "accepted"


@pytest.mark.parametrize("name", ACCEPTED)
def test_control_options_that_decide_no_byte_may_differ(said, name):
    assert said[name] == ""


def misdescribed(rank, root):
    cpu_device.enable()
    found = []
    for vocab, config, changes in ((128, {}, dict(rms_norm_eps=1e-5, num_experts_per_tok=1)), (None, dict(vocab_size=100), {})):
        with tio_megatron.apply(Contract(grain=32), vocab_size=vocab):
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(1)
            model, optimizer, schedule, _ = built(options(hf=config))
            with pytest.raises(CheckpointError) as caught:
                save_training(root, model, optimizer, schedule, CheckpointConfig.from_dict(SMALL | config | changes), step=0)
            found.append(str(caught.value))
            parallel_state.destroy_model_parallel()
    return found, root.exists()


def test_a_configuration_of_another_model_is_not_written(tmp_path):
    ((found, exists),) = run_ranks(1, misdescribed, tmp_path / "root", timeout=300)
    assert "config does not describe the model (config / model)" in found[0] and not exists
    assert "top_k: 1 / 2" in found[0] and "rms_eps: 1e-05 / 1e-06" in found[0]
    assert "vocab: 100 / 128" in found[1]  # without its true size, apply() counts padding

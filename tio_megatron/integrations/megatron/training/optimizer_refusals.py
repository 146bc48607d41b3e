"""Options of an optimizer and of data parallelism that would change a number, refused by name when the optimizer is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tio_megatron.findings.finding import OFF, Finding, Rule, broken, refuse

_FSDP = "FSDP shards and reduces in its own way"
_QUANTIZED = "quantized parameters have no kernels"
_OFFLOADED = "an optimizer split over devices would be torch's on one of them"
_SCALED = "loss scaling is not in the contract; bf16 and fp32 need none"
_PRECISION = "moments, main parameters and gradients are fp32"

OPTIMIZER_RULES = (
    Rule("optimizer", ("adam",), "no other optimizer has a kernel"),
    Rule("fp16", OFF, _SCALED),
    Rule("loss_scale", (None,), _SCALED),
    Rule("params_dtype", (torch.bfloat16, torch.float32), "only these element types have kernels"),
    Rule("fp8_recipe", (None, "delayed"), _QUANTIZED),  # Megatron-LM's scripts say "delayed" without FP8 too
    Rule("reuse_grad_buf_for_mxfp8_param_ag", OFF, _QUANTIZED),
    Rule("use_precision_aware_optimizer", OFF, _PRECISION),
    Rule("main_grads_dtype", (torch.float32,), _PRECISION),
    Rule("main_params_dtype", (torch.float32,), _PRECISION),
    Rule("exp_avg_dtype", (torch.float32,), _PRECISION),
    Rule("exp_avg_sq_dtype", (torch.float32,), _PRECISION),
    Rule("optimizer_cpu_offload", OFF, _OFFLOADED),
    Rule("use_torch_optimizer_for_cpu_offload", OFF, _OFFLOADED),
)
"""Of ``OptimizerConfig``."""

DDP_RULES = (
    Rule("use_megatron_fsdp", OFF, _FSDP),
    Rule("use_custom_fsdp", OFF, _FSDP),
    Rule("data_parallel_sharding_strategy", ("no_shard",), _FSDP),
    Rule("num_distributed_optimizer_instances", (1,), "gradients would be summed twice, within and between instances"),
    Rule("reduce_scatter_with_fp32_accumulation", OFF, "it rounds what it sends, and adds in rank order"),
    Rule("average_in_collective", OFF, "the mean is part of the loss, not of the reduction"),
    Rule("fp8_param_gather", OFF, _QUANTIZED),
    Rule("reuse_grad_buf_for_mxfp8_param_ag", OFF, _QUANTIZED),
    Rule("delay_wgrad_compute", OFF, "gradients are computed in the backward pass"),
)
"""Of ``DistributedDataParallelConfig``."""

BF16_RULES = (Rule("grad_reduce_in_fp32", (True,), "gradients would be rounded to bf16 before they are added"),)
"""Of the same, where a parameter is bf16."""


def check_optimizer(config: Any) -> None:
    """Refuse an ``OptimizerConfig`` whose optimizer cannot obey the contract.

    Raises:
        ValueError: lists every option by name, with what would work.
    """
    _refuse("the optimizer", broken(OPTIMIZER_RULES, config))


def check_ddp(config: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a ``DistributedDataParallelConfig`` whose gradients cannot obey the contract.

    Args:
        dtypes: element types of the model's parameters; gradients of bf16 parameters are fp32 only with ``grad_reduce_in_fp32``.

    Raises:
        ValueError: lists every option by name, with what would work.
    """
    found = broken(DDP_RULES, config)
    if any(dtype != torch.float32 for dtype in dtypes):
        found += broken(BF16_RULES, config)
    _refuse("data parallelism", found)


def _refuse(what: str, found: list[Finding]) -> None:
    refuse(f"{what} cannot obey the contract with these options", found)

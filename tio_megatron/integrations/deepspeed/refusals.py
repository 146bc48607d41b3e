"""What of DeepSpeed the contract does not cover, refused by its name when an engine is built, with what would work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from tio_megatron.findings.finding import OFF, Finding, Rule, broken, refuse
from tio_megatron.integrations.deepspeed.norms import OVER_TENSOR, epsilon_of

_OFFLOADED = "an offloaded optimizer is DeepSpeed's own, with other roundings"
_SCALED = "loss scaling is not in the contract; bf16 and fp32 need none"
_DIVIDED = "gradients are added exactly and divided once"
_OWN = "it sums gradients in its own way"

CONFIG_RULES = (
    Rule("zero_optimization_stage", (0, 1, 2), "ZeRO-3 gathers and reduces inside the layers, in DeepSpeed's order"),
    Rule("zero_cpu_offload", OFF, _OFFLOADED),
    Rule("fp16_enabled", OFF, _SCALED),
    Rule("torch_autocast_enabled", OFF, "it casts operands op by op; a bf16 model would work"),
    Rule("bf16_master_weights_and_gradients", OFF, "main weights, gradients and moments are fp32"),
    Rule("bf16_optimizer_states", OFF, "main weights, gradients and moments are fp32"),
    Rule("gradient_predivide_factor", (1.0, 1), _DIVIDED),
    Rule("postscale_gradients", (True,), f"{_DIVIDED} (prescale_gradients: false in the file)"),
    Rule("managed_gradient_accumulation", (True,), "the number of micro-batches must be known, to divide by it"),
    Rule("zero_quantized_gradients", OFF, _OWN),
    Rule("zero_quantized_weights", OFF, "quantized weights have no kernels"),
    Rule("zero_round_robin_gradients", OFF, "not tested"),
    Rule("zero_parameter_alignment", OFF, "not tested"),
    Rule("is_deepcompile_enabled", OFF, "it compiles the reduction into the graph"),
    Rule("random_ltd_enabled", OFF, "which tokens a layer sees would depend on the rank"),
)
"""Of an engine's own accessors, which are methods."""

FIELD_RULES = (Rule("gradient_allreduce_op", ("mean",), "a sum over micro-batches would depend on how many there are"),)
"""Of its parsed configuration."""

GATE_RULES = (
    Rule("noisy_gate_policy", (None, "None"), "its noise depends on the rank"),
    Rule("drop_tokens", OFF, "which tokens an expert keeps depends on its rank's micro-batch and capacity"),
)


WIDE = 64
"""Elements of which torch's vectorised loops take no fewer at a time (two registers of 512 bits, of bf16); those of fp32 divide it."""

_TYPES = "torch.bfloat16 or torch.float32 would work"

OPTIMIZERS = ("adam", "adamw")
"""Names of optimizers in a configuration, in small letters."""


class _Asked:
    """Answers of an engine's accessors as attributes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)()


def check_engine(engine: Any) -> None:
    """Refuse a training engine whose configuration the contract does not cover.

    Raises:
        ValueError: lists everything by name.
    """
    _refuse("deepspeed.initialize", [*broken(CONFIG_RULES, _Asked(engine)), *broken(FIELD_RULES, engine._config), *_of_engine(engine)])


def check_model(model: nn.Module, tp: int, *, strided: bool) -> None:
    """Refuse a model to be trained that has modules which the contract does not cover, or not under ``tp`` ranks of tensor parallelism.

    ``strided``: the configuration's ``use_data_before_expert_parallelism``.

    Raises:
        ValueError: lists everything by name.
    """
    _refuse("deepspeed.initialize", list(_of_model(model, training=True, tp=tp, strided=strided)))


def check_inference(config: Any, model: nn.Module) -> None:
    """The same for ``init_inference``, before it changes the model.

    Raises:
        ValueError: lists everything by name.
    """
    found = []
    if config.replace_with_kernel_inject:
        found.append(Finding("fused kernels have their own orders", "False would work", "replace_with_kernel_inject", True))
    if getattr(config.quant, "enabled", False) and str(config.dtype) == "torch.int8":
        found.append(Finding("quantized weights have no kernels", _TYPES, "dtype", config.dtype))
    if config.dtype is not None and str(config.dtype) not in ("torch.bfloat16", "torch.float32", "torch.int8"):
        found.append(Finding("only these element types have kernels", _TYPES, "dtype", config.dtype))
    if config.checkpoint is not None:
        found.append(Finding("weights that arrive while layers are replaced", "load them into the model before init_inference would work", "checkpoint"))
    if any(type(module).__name__ == "MoE" for module in model.modules()):
        works = "deepspeed.initialize and engine.eval() would work"
        found.append(Finding("their groups are built differently there", works, "MoE layers in init_inference"))
    _refuse("deepspeed.init_inference", found + list(_of_model(model, training=False, tp=1, strided=False)))


def check_layers(model: nn.Module) -> None:
    """After AutoTP has replaced layers: refuse those that have no fixed order here.

    Raises:
        ValueError: lists them by name.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, LmHeadLinearAllreduce, TensorParallel_Layer

    ours = (LinearLayer, LinearAllreduce, LmHeadLinearAllreduce)
    found = []
    for name, module in model.named_modules():
        kind = f"{name} is a {type(module).__name__}"
        if type(module).__name__ in ("VocabParallelLinear", "VocabParallelEmbedding"):
            found.append(Finding("its loss has no fixed order here", "tensor_parallel.vocab_parallel_lm_head: false would work", kind))
        elif isinstance(module, TensorParallel_Layer) and type(module) not in ours:
            found.append(Finding(f"{', '.join(one.__name__ for one in ours)} have an order", "leave it whole (partition_type: skip)", kind))
        elif type(module) in ours and len(set(module._partition_sizes)) != 1:
            works = "a size that divides it would work, or a smaller tp_grain_size"
            found.append(Finding("its parts do not fall on leaves", works, f"{name} is cut unevenly, {list(module._partition_sizes)}"))
        for part, parameter in module.named_parameters(recurse=False):
            if getattr(parameter, OVER_TENSOR, False) and epsilon_of(module) is None:
                why = f"{name}.{part} is whole on every rank and sees a part of the heads, and {type(module).__name__} is no RMS norm that has an order here"
                found.append(Finding(why, "tensor parallel size 1 would work"))
    _refuse("AutoTP", found)


def _refuse(what: str, found: list[Finding]) -> None:
    refuse(f"{what} cannot obey the contract", found)


def _of_engine(engine: Any) -> Iterator[Finding]:
    config, zero = engine._config, engine._config.zero_config
    if zero.stage == 0 and engine.bfloat16_enabled():
        yield Finding("main weights would be another class's", "stage 1 would work, on one rank too", "zero_optimization.stage=0 with bf16")
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(getattr(zero, name), "device", None)
        if device is not None and str(getattr(device, "value", device)) != "none":
            yield Finding(_OFFLOADED, "'none' would work", f"zero_optimization.{name}.device", getattr(device, "value", device))
    if zero.zenflow is not None:
        yield Finding(_OWN, "leaving it out would work", "zero_optimization.zenflow")
    if config.hybrid_engine.enabled:
        yield Finding("it swaps in inference kernels", "a second engine for sampling would work", "hybrid_engine.enabled", True)
    if config.expert_parallel_config is not None and getattr(config.expert_parallel_config, "enabled", False):
        yield Finding("it replaces the model's experts with grouped kernels", "deepspeed.moe.layer.MoE would work", "expert_parallel (AutoEP)")
    if getattr(config.tensor_parallel_config, "vocab_parallel_lm_head", None):
        works = "false would work, a row- or column-cut head too"
        yield Finding("its loss has no fixed order here", works, "tensor_parallel.vocab_parallel_lm_head", True)
    if engine.pipeline_parallelism:
        works = "tensor, expert and data parallelism would work"
        yield Finding("the pipeline engine sums losses and tied weights itself", works, "PipelineModule")
    from deepspeed.utils import groups

    if groups._get_sequence_parallel_world_size() > 1:
        yield Finding("a micro-batch would be spread over ranks", "sequence_parallel_size 1 would work", "sequence parallelism (Ulysses)")
    if engine.mpu is not None and engine.mpu is not groups:
        why = "a model-parallel unit of your own cuts layers that DeepSpeed does not know"
        yield Finding(why, "tensor_parallel.autotp_size would work", "mpu")
    if engine.client_optimizer is not None:
        yield from _of_client_optimizer(engine.client_optimizer)
    elif (name := engine.optimizer_name()) is not None and name.lower() not in OPTIMIZERS:
        yield Finding("no other optimizer than Adam has a kernel", "'AdamW' or 'Adam' would work", "optimizer.type", name)


def _of_client_optimizer(optimizer: Any) -> Iterator[Finding]:
    from tio_megatron.layers.optimizer import Adam

    if not isinstance(optimizer, Adam):
        works = "'optimizer': {'type': 'AdamW'} in the configuration would work, or tio_megatron.layers.optimizer.Adam"
        name = f"optimizer={type(optimizer).__module__}.{type(optimizer).__name__}"
        yield Finding("its roundings depend on where a parameter is cut", works, name)


def _of_model(model: nn.Module, *, training: bool, tp: int, strided: bool) -> Iterator[Finding]:
    from deepspeed.moe.layer import MoE

    for name, module in model.named_modules():
        if isinstance(module, MoE):
            found = _of_moe(module) + (_of_moe_under(module, tp, strided) if tp > 1 else [])
            yield from (replace(finding, side=name or "MoE") for finding in found)
        if training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield Finding("its random numbers depend on the rank", "0.0 would work", f"dropout {module.p}", side=name)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield Finding(f"{type(module).__name__} mixes the samples of a rank", "LayerNorm or RMSNorm would work", side=name)
        if training and isinstance(module, nn.Embedding) and module.sparse:
            yield Finding(_OWN, "sparse=False would work", "sparse gradients", side=name)


def _of_moe(module: Any) -> list[Finding]:
    gate = module.deepspeed_moe.gate
    found = broken(GATE_RULES, gate)
    if gate.k == 2 and gate.top2_2nd_expert_sampling:
        found.append(Finding("the second expert would be drawn by random numbers of the rank", "False would work", "top2_2nd_expert_sampling", True))
    if module.deepspeed_moe.use_tutel:
        found.append(Finding("Tutel adds in its own order", "False would work", "use_tutel", True))
    if module.use_residual:
        found.append(Finding("the residual's mixing is DeepSpeed's own", "False would work", "use_residual", True))
    return found


def _of_moe_under(module: Any, tp: int, strided: bool) -> list[Finding]:
    """Before its groups are made, and after AutoTP has replaced layers."""
    from deepspeed.module_inject.layers import LinearLayer, TensorParallel_Layer

    found, layer = [], module.deepspeed_moe
    if strided:
        name = "use_data_before_expert_parallelism under tensor parallelism"
        found.append(Finding("ranks with the same tokens would be in other groups", "false would work", name))
    if isinstance(layer.gate.wg, TensorParallel_Layer):
        works = "a tensor_parallel.partition_config that leaves it out would work"
        found.append(Finding("it scores a whole token", works, "AutoTP cut the router (gate.wg)"))
    summed = [name for name, one in layer.experts.named_parameters() if getattr(one, OVER_TENSOR, False)]
    if summed:
        why = "a norm inside an expert sees its whole width only where nobody cuts it"
        found.append(Finding(why, "leave it out", f"grad_allreduce on an expert's {summed[0]}"))
    if module.enable_expert_tensor_parallelism:
        odd = [(name, len(part.weight)) for name, part in layer.experts.named_modules() if isinstance(part, LinearLayer) and len(part.weight) % WIDE]
        if odd:
            why = "torch's elementwise functions end a tensor in other instructions, and where that is would depend on the cut"
            works = f"multiples of {WIDE} on each rank would work, or whole experts"
            found.append(Finding(why, works, f"AutoTP cut an expert's {odd[0][0]} to {odd[0][1]} outputs"))
        return found
    if module.ep_size % tp and module.ep_size > 1:
        why = "an expert-parallel group would hold some of the ranks with the same tokens, not all"
        works = f"1 or a multiple of {tp} would work, or enable_expert_tensor_parallelism=True with experts that are cut"
        found.append(Finding(why, works, f"ep_size={module.ep_size} under tensor parallelism of {tp}"))
    cut = [name for name, part in layer.experts.named_modules() if isinstance(part, TensorParallel_Layer)]
    if cut:
        works = "enable_expert_tensor_parallelism=True would work, or a tensor_parallel.partition_config that leaves experts out"
        found.append(Finding(f"AutoTP cut the experts ({cut[0]}), whose ranks see other tokens", works))
    return found

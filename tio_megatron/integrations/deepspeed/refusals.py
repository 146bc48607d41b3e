"""What of DeepSpeed the contract does not cover, refused by its name when an engine is built, with what would work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tio_megatron.integrations.deepspeed.norms import OVER_TENSOR, epsilon_of
from tio_megatron.integrations.megatron.rules import OFF, Rule, broken

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
    lines = []
    if config.replace_with_kernel_inject:
        lines.append("replace_with_kernel_inject=True: fused kernels have their own orders; False would work")
    if getattr(config.quant, "enabled", False) and str(config.dtype) == "torch.int8":
        lines.append("dtype=torch.int8: quantized weights have no kernels; torch.bfloat16 or torch.float32 would work")
    if config.dtype is not None and str(config.dtype) not in ("torch.bfloat16", "torch.float32", "torch.int8"):
        lines.append(f"dtype={config.dtype}: only these element types have kernels; torch.bfloat16 or torch.float32 would work")
    if config.checkpoint is not None:
        lines.append("checkpoint: weights that arrive while layers are replaced; load them into the model before init_inference would work")
    if any(type(module).__name__ == "MoE" for module in model.modules()):
        lines.append("MoE layers in init_inference: their groups are built differently there; deepspeed.initialize and engine.eval() would work")
    _refuse("deepspeed.init_inference", lines + list(_of_model(model, training=False, tp=1, strided=False)))


def check_layers(model: nn.Module) -> None:
    """After AutoTP has replaced layers: refuse those that have no fixed order here.

    Raises:
        ValueError: lists them by name.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, LmHeadLinearAllreduce, TensorParallel_Layer

    ours = (LinearLayer, LinearAllreduce, LmHeadLinearAllreduce)
    lines = []
    for name, module in model.named_modules():
        if type(module).__name__ in ("VocabParallelLinear", "VocabParallelEmbedding"):
            lines.append(f"{name} is a {type(module).__name__}: its loss has no fixed order here; tensor_parallel.vocab_parallel_lm_head: false would work")
        elif isinstance(module, TensorParallel_Layer) and type(module) not in ours:
            lines.append(f"{name} is a {type(module).__name__}: {', '.join(one.__name__ for one in ours)} have an order; leave it whole (partition_type: skip)")
        elif type(module) in ours and len(set(module._partition_sizes)) != 1:
            lines.append(
                f"{name} is cut unevenly, {list(module._partition_sizes)}: its parts do not fall on leaves; a size that divides it would work, or a smaller "
                "tp_grain_size"
            )
        for part, parameter in module.named_parameters(recurse=False):
            if getattr(parameter, OVER_TENSOR, False) and epsilon_of(module) is None:
                lines.append(
                    f"{name}.{part} is whole on every rank and sees a part of the heads, and {type(module).__name__} is no RMS norm that has an order here; "
                    "tensor parallel size 1 would work"
                )
    _refuse("AutoTP", lines)


def _refuse(what: str, lines: list[str]) -> None:
    if lines:
        raise ValueError(f"{what} cannot obey the contract:\n  " + "\n  ".join(lines))


def _of_engine(engine: Any) -> Iterator[str]:
    config, zero = engine._config, engine._config.zero_config
    if zero.stage == 0 and engine.bfloat16_enabled():
        yield "zero_optimization.stage=0 with bf16: main weights would be another class's; stage 1 would work, on one rank too"
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(getattr(zero, name), "device", None)
        if device is not None and str(getattr(device, "value", device)) != "none":
            yield f"zero_optimization.{name}.device={getattr(device, 'value', device)!r}: {_OFFLOADED}; 'none' would work"
    if zero.zenflow is not None:
        yield f"zero_optimization.zenflow: {_OWN}; leaving it out would work"
    if config.hybrid_engine.enabled:
        yield "hybrid_engine.enabled=True: it swaps in inference kernels; a second engine for sampling would work"
    if config.expert_parallel_config is not None and getattr(config.expert_parallel_config, "enabled", False):
        yield "expert_parallel (AutoEP): it replaces the model's experts with grouped kernels; deepspeed.moe.layer.MoE would work"
    if getattr(config.tensor_parallel_config, "vocab_parallel_lm_head", None):
        yield "tensor_parallel.vocab_parallel_lm_head=True: its loss has no fixed order here; false would work, a row- or column-cut head too"
    if engine.pipeline_parallelism:
        yield "PipelineModule: the pipeline engine sums losses and tied weights itself; tensor, expert and data parallelism would work"
    from deepspeed.utils import groups

    if groups._get_sequence_parallel_world_size() > 1:
        yield "sequence parallelism (Ulysses): a micro-batch would be spread over ranks; sequence_parallel_size 1 would work"
    if engine.mpu is not None and engine.mpu is not groups:
        yield "mpu: a model-parallel unit of your own cuts layers that DeepSpeed does not know; tensor_parallel.autotp_size would work"
    if engine.client_optimizer is not None:
        yield from _of_client_optimizer(engine.client_optimizer)
    elif (name := engine.optimizer_name()) is not None and name.lower() not in OPTIMIZERS:
        yield f"optimizer.type={name!r}: no other optimizer than Adam has a kernel; 'AdamW' or 'Adam' would work"


def _of_client_optimizer(optimizer: Any) -> Iterator[str]:
    from tio_megatron.layers.optimizer import Adam

    if not isinstance(optimizer, Adam):
        yield (
            f"optimizer={type(optimizer).__module__}.{type(optimizer).__name__}: its roundings depend on where a parameter is cut; "
            "'optimizer': {'type': 'AdamW'} in the configuration would work, or tio_megatron.layers.optimizer.Adam"
        )


def _of_model(model: nn.Module, *, training: bool, tp: int, strided: bool) -> Iterator[str]:
    from deepspeed.moe.layer import MoE

    for name, module in model.named_modules():
        if isinstance(module, MoE):
            lines = _of_moe(module) + (_of_moe_under(module, tp, strided) if tp > 1 else [])
            yield from (f"{name or 'MoE'}: {line}" for line in lines)
        if training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield f"{name}: dropout {module.p}: its random numbers depend on the rank; 0.0 would work"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield f"{name}: {type(module).__name__} mixes the samples of a rank; LayerNorm or RMSNorm would work"
        if training and isinstance(module, nn.Embedding) and module.sparse:
            yield f"{name}: sparse gradients: {_OWN}; sparse=False would work"


def _of_moe(module: Any) -> list[str]:
    gate = module.deepspeed_moe.gate
    lines = broken(GATE_RULES, gate)
    if gate.k == 2 and gate.top2_2nd_expert_sampling:
        lines.append("top2_2nd_expert_sampling=True: the second expert would be drawn by random numbers of the rank; False would work")
    if module.deepspeed_moe.use_tutel:
        lines.append("use_tutel=True: Tutel adds in its own order; False would work")
    if module.use_residual:
        lines.append("use_residual=True: the residual's mixing is DeepSpeed's own; False would work")
    return lines


def _of_moe_under(module: Any, tp: int, strided: bool) -> list[str]:
    """Before its groups are made, and after AutoTP has replaced layers."""
    from deepspeed.module_inject.layers import LinearLayer, TensorParallel_Layer

    lines, layer = [], module.deepspeed_moe
    if strided:
        lines.append("use_data_before_expert_parallelism under tensor parallelism: ranks with the same tokens would be in other groups; false would work")
    if isinstance(layer.gate.wg, TensorParallel_Layer):
        lines.append("AutoTP cut the router (gate.wg): it scores a whole token; a tensor_parallel.partition_config that leaves it out would work")
    summed = [name for name, one in layer.experts.named_parameters() if getattr(one, OVER_TENSOR, False)]
    if summed:
        lines.append(f"grad_allreduce on an expert's {summed[0]}: a norm inside an expert sees its whole width only where nobody cuts it; leave it out")
    if module.enable_expert_tensor_parallelism:
        odd = [(name, len(part.weight)) for name, part in layer.experts.named_modules() if isinstance(part, LinearLayer) and len(part.weight) % WIDE]
        if odd:
            lines.append(
                f"AutoTP cut an expert's {odd[0][0]} to {odd[0][1]} outputs: torch's elementwise functions end a tensor in other instructions, and where "
                f"that is would depend on the cut; multiples of {WIDE} on each rank would work, or whole experts"
            )
        return lines
    if module.ep_size % tp and module.ep_size > 1:
        lines.append(
            f"ep_size={module.ep_size} under tensor parallelism of {tp}: an expert-parallel group would hold some of the ranks with the same tokens, not all; "
            f"1 or a multiple of {tp} would work, or enable_expert_tensor_parallelism=True with experts that are cut"
        )
    cut = [name for name, part in layer.experts.named_modules() if isinstance(part, TensorParallel_Layer)]
    if cut:
        lines.append(
            f"AutoTP cut the experts ({cut[0]}), whose ranks see other tokens: enable_expert_tensor_parallelism=True would work, or a "
            "tensor_parallel.partition_config that leaves experts out"
        )
    return lines

"""A model becomes one of the contract's: its linears, norms and MoE layers, where they lie."""

from __future__ import annotations

from torch import nn

from tio_megatron.contract.environment import Setting
from tio_megatron.integrations.deepspeed import refusals
from tio_megatron.integrations.deepspeed.linears import OrderedLinear, leaves_for
from tio_megatron.integrations.deepspeed.norms import adopt_norm, epsilon_of


def adopt(model: nn.Module, setting: Setting) -> None:
    """After AutoTP has cut ``model``: every linear, RMS norm and MoE layer computes in the contract's order from now on.

    Parameters, their names and their data are untouched. Linears of other classes than ``nn.Linear`` and AutoTP's stay as they are: nobody cuts them.

    Raises:
        ValueError: a layer that has no order here, or a cut that does not fall on leaves.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, LmHeadLinearAllreduce
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    refusals.check_layers(model)
    gates = {id(module.wg) for module in model.modules() if isinstance(module, TopKGate)}
    for name, module in model.named_modules():
        if type(module) is LinearLayer:
            ranks = module.tp_world_size
            outputs, inputs = module.weight.shape
            module.tio_leaves = leaves_for(setting.contract, setting, outputs * ranks, inputs, (ranks, 1), name)  # type: ignore[assignment]
        elif type(module) in (LinearAllreduce, LmHeadLinearAllreduce):
            ranks = module.tp_world_size  # type: ignore[assignment]
            outputs, inputs = module.weight.shape  # type: ignore[union-attr]
            module.tio_leaves = leaves_for(setting.contract, setting, outputs, inputs * ranks, (1, ranks), name)  # type: ignore[assignment]
        elif (epsilon := epsilon_of(module)) is not None:
            adopt_norm(module, epsilon, setting)
        elif isinstance(module, MOELayer):
            module.tio_setting = setting  # type: ignore[assignment]
        elif type(module) in (nn.Linear, OrderedLinear) and id(module) not in gates:
            module.__class__ = OrderedLinear
            outputs, inputs = module.weight.shape  # type: ignore[union-attr]
            module.tio_leaves = leaves_for(setting.contract, setting, outputs, inputs, (1, 1), name)  # type: ignore[assignment]

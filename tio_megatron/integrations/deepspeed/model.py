"""A model becomes one of the contract's: its linears, norms and MoE layers, where they lie."""

from __future__ import annotations

from typing import Any

from torch import nn

from tio_megatron.contract.environment import Setting
from tio_megatron.integrations.deepspeed import refusals
from tio_megatron.integrations.deepspeed.linears import OrderedLinear, leaves_for
from tio_megatron.integrations.deepspeed.norms import adopt_norm, epsilon_of
from tio_megatron.integrations.deepspeed.peers import adopt_peers
from tio_megatron.integrations.deepspeed.state import SETTING


def adopt(model: nn.Module, setting: Setting, peers: Any = None) -> None:
    """After AutoTP has cut ``model``: every linear, RMS norm and MoE layer computes in the contract's order from now on.

    Parameters, their names and their data are untouched. Linears of other classes than ``nn.Linear`` and AutoTP's stay as they are: nobody cuts them.
    ``peers``: the tensor-parallel group of an engine that trains.

    Raises:
        ValueError: a layer that has no order here, or a cut that does not fall on leaves.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, LmHeadLinearAllreduce
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    refusals.check_layers(model)
    gates = {id(module.wg) for module in model.modules() if isinstance(module, TopKGate)}
    for name, module in model.named_modules():
        if type(module) in (LinearLayer, LinearAllreduce, LmHeadLinearAllreduce):
            ranks = module.tp_world_size
            _order(module, name, (ranks, 1) if type(module) is LinearLayer else (1, ranks), setting)
        elif (epsilon := epsilon_of(module)) is not None:
            adopt_norm(module, epsilon, setting)
        elif isinstance(module, MoE):
            adopt_peers(module, peers)
        elif isinstance(module, MOELayer):
            setattr(module, SETTING, setting)
        elif type(module) in (nn.Linear, OrderedLinear) and id(module) not in gates:
            module.__class__ = OrderedLinear
            _order(module, name, (1, 1), setting)


def _order(linear: Any, name: str, parts: tuple[int, int], setting: Setting) -> None:
    """``parts``: in how many its outputs and its inputs are cut; it holds one."""
    outputs, inputs = (length * cut for length, cut in zip(linear.weight.shape, parts, strict=True))
    linear.tio_leaves = leaves_for(setting.contract, outputs, inputs, parts, name)
    setattr(linear, SETTING, setting)

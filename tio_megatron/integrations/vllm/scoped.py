"""Stock model code with our layers inside: the out-of-tree registry is ours only while one of these models is built.

Nothing is registered for good, so other plug-ins that replace the same layers (vllm-ascend) are untouched, and no model code, weight
name or sharding rule of vLLM is copied.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor import custom_op
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import attention as stock_attention

from tio_megatron.integrations.vllm import in_force, parts, refusals
from tio_megatron.integrations.vllm.building import Build, building
from tio_megatron.integrations.vllm.front import ARGUMENT
from tio_megatron.integrations.vllm.weights import Ledger, Stock
from tio_megatron.models import architectures, tensor_table

PARTS = parts.chosen()
REPLACEMENTS = PARTS.replacements


@contextlib.contextmanager
def swapped(build: Build) -> Iterator[None]:
    """Within the block, vLLM's layer classes make ours; afterwards every registry is as it was."""
    registry, ropes, backend = dict(custom_op.op_registry_oot), dict(rotary_embedding._ROPE_DICT), stock_attention.get_attn_backend
    custom_op.op_registry_oot.update(REPLACEMENTS)
    # get_rope hands out one instance to all models of a process.
    rotary_embedding._ROPE_DICT.clear()
    stock_attention.get_attn_backend = lambda *args, **kwargs: PARTS.attention
    try:
        with building(build):
            yield
    finally:
        stock_attention.get_attn_backend = backend
        _restore(rotary_embedding._ROPE_DICT, ropes)
        _restore(custom_op.op_registry_oot, registry)


def _restore(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    table.clear()
    table.update(before)


class _FixedOrderModel(Stock):
    """Mixin before a stock model class."""

    ledger: Ledger

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        contract = in_force.active()
        refusals.check(vllm_config, contract)
        # vLLM keeps compiled graphs by the hash of its configuration, and the contract's numbers are in them.
        vllm_config.additional_config = {**(vllm_config.additional_config or {}), ARGUMENT: contract.to_dict()}
        # Nothing elementwise stays between our operators today; if something ever does, it is rounded where eager mode rounds it.
        vllm_config.compilation_config.inductor_compile_config["emulate_precision_casts"] = True
        build = Build(contract)
        with swapped(build):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.contract, self.ledger = contract, build.ledger
        self.shape = refusals.shape_of(vllm_config)
        self._refuse_stock_layers()

    def _refuse_stock_layers(self) -> None:
        """A layer that has a replacement, or that computes and is not known, must not be stock's."""
        assert isinstance(self, torch.nn.Module)
        replaceable, ours = (custom_op.CustomOp, custom_op.PluggableLayer), tuple(REPLACEMENTS.values())
        names = {type(module).__name__ for module in self.modules() if isinstance(module, replaceable) and not isinstance(module, ours)}
        stock = sorted(names - PARTS.harmless)
        if stock:
            raise ValueError(f"tio_megatron does not cover these layers of the model: {', '.join(stock)}")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's loading; afterwards every weight is packed again. Any subset of names, in any order."""
        ledger, seen = self.ledger, set[str]()
        ledger.loading()

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                seen.add(name)
                yield name, tensor

        try:
            loaded = super().load_weights(counted())
        except BaseException as error:
            ledger.fail(f"a load of weights failed ({type(error).__name__}: {error})")
            raise
        finally:
            ledger.close()
        ledger.arrive(seen, tensor_table(self.shape).keys())
        return loaded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's forward. The last line of defence: :mod:`.refusing` keeps requests from coming here while weights are half loaded.

        Raises:
            ValueError: weights are half loaded.
        """
        ledger = self.ledger
        broken = ledger.stopped()
        if broken:
            raise ValueError(f"tio_megatron: weights are not whole: {broken}")
        if ledger.is_open():
            ledger.close()
        ledger.served = True
        return super().forward(*args, **kwargs)


@functools.cache
def __getattr__(name: str) -> type:
    """Our class of each architecture that is described, made when it is asked for: vLLM's class of that architecture, every sum in the contract's order."""
    if (described := architectures().get(name.removeprefix("Tio"))) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, stock = described.vllm.partition(":")
    bases = (_FixedOrderModel, getattr(importlib.import_module(module), stock))
    return type(name, bases, {"__module__": __name__, "__doc__": f"vLLM's {stock}, every sum in the contract's order."})

"""What is patched in the process that starts an engine, so that a bad start is one readable line there and not a worker's traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tio_megatron.contract.environment import read
from tio_megatron.integrations.vllm import plugin, refusals

ARGUMENT = "tio_contract"
"""Key of ``additional_config`` that holds the contract."""

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Patch this process's front end (:func:`.patches.front_patches`). Engines without a contract are as before. Harmless when repeated."""
    if not _undo:
        from tio_megatron.integrations.patching import install as install_patches
        from tio_megatron.integrations.vllm.patches import front_patches

        _undo.append(install_patches(front_patches()).undo)


def uninstall() -> None:
    """Take it back."""
    while _undo:
        _undo.pop()()


def refuse_early(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``EngineArgs.create_engine_config``: every way to start an engine passes here, before any other process starts."""

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = (self.additional_config or {}).get(ARGUMENT)
        contract = read(given).contract if given is not None else plugin.active() if plugin.is_active() else None
        config = stock(self, *args, **kwargs)
        if contract is not None:
            refusals.check(config, contract)
            refusals.check_dtype(self.dtype, config)
        return config

    return create_engine_config

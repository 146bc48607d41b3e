"""Whether what an engine was built under is in force. The setting itself is the process's own, shared with the other engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tio_megatron.contract.environment import Setting
from tio_megatron.integrations.megatron.applied.state import active, session

__all__ = ["SETTING", "active", "ordered", "refuse_run", "session"]

SETTING = "tio_setting"
"""Attribute of a layer of DeepSpeed's own class that is under a contract."""


def refuse_run(built_under: Setting) -> None:
    """Refuse to run what was built under another contract than the one in force.

    Raises:
        RuntimeError: there is none, or another.
    """
    if session() != built_under:
        raise RuntimeError(
            "this DeepSpeed engine was built under a contract that is not in force any more: call tio_megatron.apply() with the same one again, and undo() "
            "only after the engine's last use"
        )


def ordered(ours: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The patch of a layer's ``forward``: a layer that was built under a contract runs ``ours``, any other the original."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            setting = getattr(self, SETTING, None)
            if setting is None:
                return original(self, *args, **kwargs)
            refuse_run(setting)
            return ours(self, *args, **kwargs)

        return forward

    return build

"""Whether what an engine was built under is in force. The setting itself is the process's own, shared with the other engines."""

from __future__ import annotations

from tio_megatron.contract.environment import Setting
from tio_megatron.integrations.megatron.state import active, session

__all__ = ["active", "refuse_run", "session"]


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

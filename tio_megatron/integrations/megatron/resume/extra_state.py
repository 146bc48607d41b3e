"""``_extra_state``: what Transformer Engine's modules save beside their weights (scales of FP8, empty without it).

Ours have no use for it. It is kept as it was loaded and saved again, so that a checkpoint that passes through our models is unchanged.
Nothing in it is looked at, least of all unpickled.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

NAME = "_extra_state"
_NOTHING = object()


class KeepsExtraState(torch.nn.Module):
    """A mixin, before the module's own class.

    ``saves_nothing``: save ``None`` where nothing was loaded, as megatron-core's local linear layers do; else the entry is left out.
    """

    saves_nothing = False
    _kept: Any = _NOTHING

    def get_extra_state(self) -> Any:
        """What was loaded, or ``None``."""
        return None if self._kept is _NOTHING else self._kept

    def set_extra_state(self, state: Any) -> None:
        """Keep it."""
        if state is not _NOTHING:
            self._kept = state

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        # Not every release of Transformer Engine writes it, and models of local layers have less of it: never missing.
        state_dict.setdefault(f"{prefix}{NAME}", _NOTHING)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._kept is _NOTHING and not self.saves_nothing:
            del destination[f"{prefix}{NAME}"]

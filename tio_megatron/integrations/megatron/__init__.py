"""megatron-core under the contract: specs, patches with undo, a CPU device. Adapts shapes, weights and groups; no arithmetic lives here.

Importing this package does not import megatron-core; the names below do when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "BadGradient": "training.grad_refusals",
    "Scores": "scoring.logprobs",
    "finalize_weighted_grads": "training.grad_patches",
    "gpt_layer_spec": "modules.specs",
    "token_logprobs": "scoring.logprobs",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

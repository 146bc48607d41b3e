"""MindSpeed's patch manager as seen from here: every name of MindSpeed that this package relies on, and nothing else of it.

What is relied on (branch core_r0.16.0):

* ``register_patch(path, function)``: a function whose name ends in ``wrapper`` or ``decorator`` is stacked, in the order of registration, and
  is called with what lies below it; any other function is a plain replacement, of which there can be one.
* ``apply_patches()`` rebuilds every symbol whose patches changed, and writes it to every module that holds the old one under the same name.
* ``remove_patches()`` forgets all patches of everybody and writes the originals back, except in modules with ``mindspeed`` in their name.
* ``patches_info`` maps a path to an entry with ``orig_module``, ``orig_func``, ``orig_func_name``, ``patch_func``, ``wrappers``,
  ``final_patch_func`` and ``is_applied``.
* ``MindSpeedFeaturesManager.FEATURES_LIST`` holds the features that ``repatch`` asks, in order, to register their patches again.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

PATCHES = "mindspeed.patch_utils"
FEATURES = "mindspeed.features_manager"
ADAPTOR = "mindspeed.megatron_adaptor"
ARGUMENTS = "mindspeed.args_utils"


def present() -> bool:
    """Whether MindSpeed has patched megatron-core in this process (its adaptor was imported)."""
    return sys.modules.get(ADAPTOR) is not None


def manager() -> Any:
    """``MindSpeedPatchesManager``."""
    return importlib.import_module(PATCHES).MindSpeedPatchesManager


def features() -> list[Any]:
    """The live list of features."""
    found: list[Any] = importlib.import_module(FEATURES).MindSpeedFeaturesManager.FEATURES_LIST
    return found


def arguments() -> Any:
    """The arguments that MindSpeed reads now: Megatron's where there are any, else its own with what ``repatch`` has set."""
    return importlib.import_module(ARGUMENTS).get_full_args()


def default_arguments() -> Any:
    """All options of MindSpeed with their defaults."""
    return importlib.import_module(ARGUMENTS).get_mindspeed_args(get_defaults=True)


def replaced_by() -> dict[int, Any]:
    """``id`` of each object that MindSpeed has put in the place of a symbol, and the stock object it stands for."""
    if not present():
        return {}
    return {id(entry.final_patch_func): entry.orig_func for entry in manager().patches_info.values() if entry.final_patch_func is not None}


def stock(thing: Any) -> Any:
    """The stock object that ``thing`` stands for under MindSpeed; ``thing`` itself if it is nobody's replacement."""
    return replaced_by().get(id(thing), thing)

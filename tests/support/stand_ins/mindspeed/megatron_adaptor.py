"""Importing this patches megatron-core."""

from __future__ import annotations

from typing import Any

from mindspeed.args_utils import get_full_args
from mindspeed.features_manager import MindSpeedFeaturesManager


def repatch(args: dict[str, Any]) -> None:
    MindSpeedFeaturesManager.remove_patches()
    full = get_full_args()
    for name, value in args.items():
        setattr(full, name, value)
    MindSpeedFeaturesManager.apply_features_pre_patches(full)
    MindSpeedFeaturesManager.apply_features_patches(full)


MindSpeedFeaturesManager.apply_features_pre_patches(get_full_args())
MindSpeedFeaturesManager.apply_features_patches(get_full_args())

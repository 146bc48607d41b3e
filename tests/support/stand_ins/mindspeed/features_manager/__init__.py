"""Features: what patches megatron-core, and is asked again at each ``repatch``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from mindspeed.patch_utils import MindSpeedPatchesManager


class MindSpeedFeature:
    """Base of the features."""

    def is_need_apply(self, args: Any) -> bool:
        return True

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        pass

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        pass


class MindSpeedFeaturesManager:
    FEATURES_LIST: ClassVar[list[Any]] = []

    @classmethod
    def apply_features_pre_patches(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.pre_register_patches(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.register_patches(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def remove_patches(cls) -> None:
        MindSpeedPatchesManager.remove_patches()


def noting_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes everything on."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Basic(MindSpeedFeature):
    """What is always there: shared with ours are a configuration's wrapper, the start of the gradients' sum and the rotation."""

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.replacements import PTNorm, apply_rotary_pos_emb, finish_grad_sync, start_grad_sync

        core = "megatron.core"
        groups = f"{core}.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
        patch_manager.register_patch(f"{core}.transformer.transformer_config.TransformerConfig.__post_init__", noting_wrapper)
        patch_manager.register_patch(f"{core}.transformer.torch_norm.WrappedTorchNorm", PTNorm)
        patch_manager.register_patch(f"{groups}.start_grad_sync", start_grad_sync)
        patch_manager.register_patch(f"{groups}.finish_grad_sync", finish_grad_sync)
        patch_manager.register_patch(f"{core}.models.common.embeddings.rope_utils.apply_rotary_pos_emb", apply_rotary_pos_emb)
        patch_manager.register_patch(f"{core}.transformer.dot_product_attention.DotProductAttention.forward", noting_wrapper)


class FlashAttention(MindSpeedFeature):
    """Replaces ``DotProductAttention.forward``."""

    def is_need_apply(self, args: Any) -> bool:
        return bool(getattr(args, "use_flash_attn", False)) and getattr(args, "context_parallel_size", 1) < 2

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.replacements import dot_product_attention_forward_impl

        patch_manager.register_patch("megatron.core.transformer.dot_product_attention.DotProductAttention.forward", dot_product_attention_forward_impl)


class ContextParallel(MindSpeedFeature):
    """Replaces the class."""

    def is_need_apply(self, args: Any) -> bool:
        return getattr(args, "context_parallel_size", 1) > 1

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.replacements import cp_attention

        patch_manager.register_patch("megatron.core.transformer.dot_product_attention.DotProductAttention", cp_attention())


class Recompute(MindSpeedFeature):
    """Replaces block recomputation."""

    def is_need_apply(self, args: Any) -> bool:
        return getattr(args, "recompute_method", None) == "block"

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.replacements import checkpointed_forward

        patch_manager.register_patch("megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward", checkpointed_forward)


MindSpeedFeaturesManager.FEATURES_LIST[:] = [Basic(), FlashAttention(), ContextParallel(), Recompute()]

"""What the features put in the place of megatron-core's symbols; none of it may run in a model under a contract."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb as _stock_rotation

# By its stock name, as modules of MindSpeed import such things: the manager rewrites it and does not give it back.
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32  # noqa: F401
from megatron.core.transformer.dot_product_attention import DotProductAttention as _StockAttention


class PTNorm:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("MindSpeed's norm was built")


def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
    return _stock_rotation(*args, **kwargs)


def start_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
    raise AssertionError("MindSpeed's sum of gradients ran")


def finish_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
    if not self.ddp_config.overlap_grad_reduce:
        self.start_grad_sync()
        return
    if self.is_first_batch:
        self.start_grad_sync(force_all_reduce=force_all_reduce)
    for handle in self.grad_reduce_handle:
        handle.wait()
    self.grad_reduce_handle = None


def dot_product_attention_forward_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("MindSpeed's attention ran")


@functools.cache
def cp_attention() -> type:
    class MindSpeedCPDotProductAttention(_StockAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("MindSpeed's context-parallel attention was built")

    return MindSpeedCPDotProductAttention


def checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("MindSpeed's recomputation ran")

"""The grouped product on an NPU by ``npu_grouped_matmul``, where its order fits the contract: one leaf, the result in the type of x.

*Built, not run*, and its order is not published: that the cube adds the K terms of a row in one fp32 accumulator, and the same whatever rows stand beside
it, is what ``ascend_selfcheck`` asks first. More leaves, or partial sums in fp32 (expert tensor parallelism), go to our Triton kernel. The two never share
a product: how many leaves it has is the contract's, not a layout's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tio_megatron.kernels.npu.calls import find
from tio_megatron.kernels.npu.limits import check_grouped
from tio_megatron.kernels.npu.lowered import PACKAGE, kernels
from tio_megatron.kernels.operands import require

TRITON = kernels("grouped")
CUMULATIVE = 0
"""group_list_type: the entries are ends of groups, which are the contract's offsets without the first."""


def grouped(x: Tensor, w: list[Tensor], offsets: Tensor, leaves: int, paired: bool, out_dtype: torch.dtype) -> Tensor:
    """``x[R, K]`` sorted by expert, one ``w[N, K]`` for each, ``offsets[E + 1]`` to ``[R, N]``; ``tio::grouped``.

    Raises:
        ValueError: the documents forbid the shapes or types; several leaves or a result of another type where there is no Triton.
    """
    if leaves != 1 or out_dtype != x.dtype:
        ours = TRITON.get("grouped")
        words = f"{leaves} leaves to {out_dtype}; torch_npu's operator has one leaf and the type of x"
        require(ours is not None, "grouped product", f"{words}. Cut experts whole (ETP 1, cuts.expert_row = 1), or install {PACKAGE} for our Triton kernel")
        return ours(x, w, offsets, leaves, paired, out_dtype)  # type: ignore[misc]
    x = x.contiguous()
    if not x.shape[0]:
        return x.new_empty(0, w[0].shape[0])
    # Contiguous or transposed is what the operator takes, and a single weight with an axis of experts.
    laid = [one if one.is_contiguous() or one.t().is_contiguous() else one.contiguous() for one in w]
    weights = [one.t() for one in laid] if len(laid) > 1 else [laid[0].t().unsqueeze(0)]
    ends = offsets[1:]
    kinds: dict[str, Any] = {"split_item": 2, "group_type": 0, "group_list_type": CUMULATIVE}
    check_grouped(x, weights, ends, **kinds)
    (y,) = find("npu_grouped_matmul")([x], weights, group_list=ends, **kinds)
    return y


KERNELS: dict[str, Callable[..., Any]] = {**TRITON, "grouped": grouped}

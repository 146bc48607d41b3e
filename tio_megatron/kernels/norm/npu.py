"""RMSNorm on an NPU by ``npu_rms_norm``: fp32 inside, the weight multiplied before the one rounding, the sum of squares in the family's order.

*Built, not run.* The open sources choose the kernel by the width of a row alone, so a row does not see how many others there are. The gradient is our
Triton kernel's: the vendor's adds the weight's gradient over rows in an order of its own.

The average is a product with ``1 / H``, the same as the contract's division where H is a power of two; other widths are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tio_megatron.contract.tree import is_power_of_two
from tio_megatron.kernels.npu.calls import find
from tio_megatron.kernels.npu.limits import check_rms_norm
from tio_megatron.kernels.npu.lowered import kernels
from tio_megatron.kernels.operands import require


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """``x[..., H]``, ``w[H]`` of one type to ``[..., H]``; ``tio::rms_norm``.

    Raises:
        ValueError: the documents forbid the shapes or types, or H is not a power of two.
    """
    require(is_power_of_two(x.shape[-1]), "rms_norm", f"rows of {x.shape[-1]}; on an NPU the operator multiplies by 1 / H, which is exact for powers of two")
    rows = x.contiguous() if x.dim() > 1 else x.unsqueeze(0)
    check_rms_norm(rows, w, eps)
    y, _ = find("npu_rms_norm")(rows, w, eps)
    return y.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``new = round(x + residual)`` and its norm, as two calls: the fused one does not say that it reads the rounded sum. ``tio::add_rms_norm``.

    Raises:
        ValueError: as :func:`rms_norm`.
    """
    total = x + residual
    return rms_norm(total, w, eps), total


KERNELS: dict[str, Callable[..., Any]] = {**kernels("norm"), "rms_norm": rms_norm, "add_rms_norm": add_rms_norm}

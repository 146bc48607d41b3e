"""exp and log: one polynomial each, fused multiply-adds only, so that any machine can give the same bits.

Error in units of the last place: exp at most 0.56 (0.76 where the result is subnormal: it is rounded twice there), log at most 0.79.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.exact import fma, tree_sum

LOG2E = float.fromhex("0x1.715476p+0")
LN2_HI = float.fromhex("0x1.62e4p-1")
"""Top 15 bits of log 2, so that n * LN2_HI is exact for every exponent n."""
LN2_LO = float.fromhex("0x1.7f7d1cp-20")
MAGIC = 1.5 * 2.0**23
"""Adding it rounds to an integer, which then stands in the low bits."""
EXP_LOW, EXP_HIGH = -104.0, 89.0
"""Below exp is 0, above it is infinite."""
EXP = tuple(map(float.fromhex, ("0x1.9df7f6p-13", "0x1.6d4cdap-10", "0x1.111310p-7", "0x1.5554e8p-5", "0x1.555554p-3")))
"""exp(r) = 1 + r + r^2 / 2 + r^3 * poly(r) for |r| <= log(2) / 2; highest power first."""
LOG = tuple(
    map(
        float.fromhex,
        (
            "0x1.1484e8p-4",
            "-0x1.de1004p-4",
            "0x1.e6c03ep-4",
            "-0x1.fc26acp-4",
            "0x1.233b78p-3",
            "-0x1.555c4ep-3",
            "0x1.99a478p-3",
            "-0x1.000006p-2",
            "0x1.555548p-2",
        ),
    )
)
"""log(1 + f) = f - f^2 / 2 + f^3 * poly(f) for 1 + f between sqrt(1/2) and sqrt(2); highest power first."""
SQRT_HALF_BITS = 0x3F3504F3


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = x.new_tensor(coefficients[0])
    for c in coefficients[1:]:
        total = fma(total, x, x.new_tensor(c))
    return total


def _power_of_two(n: Tensor) -> Tensor:
    return ((n.int() + 127) << 23).view(torch.float32)


def exp(x: Tensor) -> Tensor:
    """e to the power of each fp32 element. Subnormal results are rounded once; NaN stays NaN."""
    f = x.new_tensor
    clamped = torch.where(x < EXP_LOW, EXP_LOW, torch.where(x > EXP_HIGH, EXP_HIGH, x))
    n = fma(clamped, f(LOG2E), f(MAGIC)) - MAGIC
    rough = fma(n, f(-LN2_HI), clamped)
    r = fma(n, f(-LN2_LO), rough)
    r_error = fma(n, f(-LN2_LO), rough - r)
    head = 1.0 + r
    square = r * r
    tail = fma(fma(r, r, -square), f(0.5), fma(r_error, head, r - (head - 1.0)))  # what the roundings of r, 1 + r and r * r lost
    y = head + fma(square, f(0.5), fma(_polynomial(r, EXP), square * r, tail))
    n = torch.where(x.isnan(), 0.0, n).int()
    half = n >> 1
    return y * _power_of_two(half) * _power_of_two(n - half)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of each fp32 element: -inf at both zeros, NaN below."""
    f = x.new_tensor
    small = x < 2.0**-126
    bits = torch.where(small, x * 2.0**23, x).view(torch.int32)
    e = (bits - SQRT_HALF_BITS) >> 23
    y = (bits - (e << 23)).view(torch.float32) - 1.0
    n = e.float() - torch.where(small, 23.0, 0.0)
    square = y * y
    tail = fma(n, f(LN2_LO), _polynomial(y, LOG) * y * square)
    result = fma(n, f(LN2_HI), y + fma(square, f(-0.5), tail))
    result = torch.where(x == float("inf"), x, result)
    return torch.where(x == 0, float("-inf"), torch.where((x < 0) | x.isnan(), float("nan"), result))


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + exp(-x))


def tree_add(parts: Tensor) -> Tensor:
    """Sum of ``parts[P, ...]`` fp32 over the first axis by the tree over P."""
    return tree_sum(parts)

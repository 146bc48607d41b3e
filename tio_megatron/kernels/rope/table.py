"""cos and sin of every angle, the same bits on every machine.

Vendor cosines differ between the vector body and its tail, and between libraries. Here the frequencies come from decimal
arithmetic (correctly rounded to float64), the angle is one float64 product, and cosine and sine are a reduction by pi/2 followed by
Taylor polynomials in plain float64 multiplications and additions; then one rounding to fp32.
"""

from __future__ import annotations

import decimal
import functools
import math

import torch
from torch import Tensor

from tio_megatron.contract.model import MAX_POSITIONS

_PI_2 = (float.fromhex("0x1.921fb544p+0"), float.fromhex("0x1.0b4611a6p-34"), float.fromhex("0x1.3198a2e037073p-69"))
"""pi / 2 in three parts; the first two have 33 bits, so their products with a quadrant number below 2^20 are exact."""
_SIN = tuple((-1.0) ** (n // 2) / math.factorial(n) for n in range(17, 0, -2))
_COS = tuple((-1.0) ** (n // 2) / math.factorial(n) for n in range(18, -1, -2))


@functools.lru_cache(maxsize=8)
def rope_table(positions: int, dim: int, base: float) -> Tensor:
    """The table ``[positions, dim]`` fp32: cos of the dim / 2 frequencies, then sin. Shared between calls: do not write to it.

    Raises:
        ValueError: ``dim`` is not even and positive, ``base`` is not above 1, or ``positions`` is outside 1 .. 2^20.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"rope_table: dim must be even and positive, got {dim}")
    if not base > 1:
        raise ValueError(f"rope_table: base must be above 1, got {base}")
    if not 1 <= positions <= MAX_POSITIONS:
        raise ValueError(f"rope_table: positions must be between 1 and {MAX_POSITIONS}, got {positions}")
    frequency = torch.tensor(inverse_frequencies(dim, base), dtype=torch.float64, device="cpu")
    table = torch.empty(positions, dim, dtype=torch.float32, device="cpu")  # vLLM builds its models under another default dtype
    for start in range(0, positions, 4096):
        stop = min(positions, start + 4096)
        angle = torch.arange(start, stop, dtype=torch.float64, device="cpu").unsqueeze(1) * frequency
        cos, sin = cos_sin(angle)
        table[start:stop, : dim // 2] = cos.float()
        table[start:stop, dim // 2 :] = sin.float()
    return table


def inverse_frequencies(dim: int, base: float) -> list[float]:
    """``base ** (-2i / dim)`` for i below dim / 2, each the float64 nearest to the exact value.

    >>> inverse_frequencies(4, 10000.0)
    [1.0, 0.01]
    """
    with decimal.localcontext(decimal.Context(prec=50)) as context:
        log = context.ln(decimal.Decimal(base))
        return [float(context.exp(-log * 2 * i / dim)) for i in range(dim // 2)]


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of float64 angles between 0 and 2^20 radians, within about 1e-16."""
    quadrant = torch.round(angle * (2 / math.pi))
    r = ((angle - quadrant * _PI_2[0]) - quadrant * _PI_2[1]) - quadrant * _PI_2[2]
    square = r * r
    sin, cos = torch.full_like(r, _SIN[0]), torch.full_like(r, _COS[0])
    for c in _SIN[1:]:
        sin = sin * square + c
    for c in _COS[1:]:
        cos = cos * square + c
    sin = sin * r
    odd = quadrant.long() & 1 == 1
    cos, sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    turn = quadrant.long() & 3
    return torch.where((turn == 1) | (turn == 2), -cos, cos), torch.where(turn >= 2, -sin, sin)

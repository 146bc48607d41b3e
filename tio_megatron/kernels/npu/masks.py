"""The one mask that every call takes: 2048 x 2048, made once for each device. The operators unfold it to any length."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

EDGE = 2048

CAUSAL = 3
"""sparse_mode: causal, aligned at the last query and the last key. A whole sequence, a chunk and one decoded token are all this."""


@cache
def causal(device: torch.device) -> Tensor:
    """``[2048, 2048]`` bool, True above the diagonal: True is not seen."""
    with torch.inference_mode(False):  # kept for training too, whoever asks first
        return torch.ones(EDGE, EDGE, dtype=torch.bool, device=device).triu_(1)

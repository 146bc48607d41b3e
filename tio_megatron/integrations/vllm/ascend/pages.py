"""vllm-ascend's two tensors of keys and values as one cache: halves of one piece of memory, which is how the NPU family's kernels take pages.

vllm-ascend allocates keys and values apart. :func:`joined` has it allocate them side by side, and :func:`one_cache` looks at both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def joined(allocate: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """``NPUModelRunner._allocate_kv_cache_tensors``, with each layer's keys and values in one piece of memory, keys first.

    Raises:
        ValueError: a layer has another kind of cache than keys and values of one size.
    """

    def allocate_joined(kv_cache_config: Any) -> dict[str, Any]:
        found = allocate(kv_cache_config)
        pieces: dict[int, tuple[Tensor, Tensor]] = {}
        for name, parts in found.items():
            if not isinstance(parts, tuple) or len(parts) != 2 or parts[0].numel() != parts[1].numel() or parts[0].dtype != parts[1].dtype:
                raise ValueError(f"{name}: only a cache of keys and values of one size is covered")
            # Layers may share a cache.
            if parts[0].data_ptr() not in pieces:
                whole = torch.zeros(2 * parts[0].numel(), dtype=parts[0].dtype, device=parts[0].device)
                pieces[parts[0].data_ptr()] = (whole[: parts[0].numel()], whole[parts[0].numel() :])
            found[name] = pieces[parts[0].data_ptr()]
        return found

    return allocate_joined


def one_cache(keys: Tensor, values: Tensor) -> Tensor:
    """``[pages, kv heads, page, 2 * D]`` over the memory of both, as the NPU family reads it: its first half all keys, its second all values.

    Args:
        keys, values: ``[pages, page, kv heads, D]``, halves of one piece of memory.

    Raises:
        ValueError: they are not.
    """
    pages, page, heads, size = keys.shape
    beside = values.data_ptr() == keys.data_ptr() + keys.numel() * keys.element_size() and values.shape == keys.shape
    if not (keys.is_contiguous() and values.is_contiguous() and beside):
        raise ValueError("pages: keys and values do not lie side by side; the worker must be tio_megatron's (worker_cls, see engine_options)")
    return keys.as_strided((pages, heads, page, 2 * size), (heads * page * 2 * size, page * 2 * size, 2 * size, 1))

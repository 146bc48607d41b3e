"""What torch_npu's documents forbid in products, permutations, norms and page writes. Its own shape functions check nothing.

Each function returns nothing and raises ``ValueError`` with what, where and what would work. Limits are those that the wheel's own documentation
(``torch_npu/_op_plugin_docs.py`` of 2.13.0) gives for Atlas A2 and A3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.operands import require

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)

INNER = 65536
"""The last axis of an operand of a grouped product stays below this."""
MAX_LIST = 128
MAX_GROUPS = 1024
MAX_INDICES = 16777215
MAX_TOP_K = 512
MAX_DIMS = 8


def names(dtypes: Sequence[torch.dtype]) -> str:
    """``bfloat16 or float16``, for messages."""
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_kind(what: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], *dims: int) -> None:
    """An element type and a number of axes that the operator takes."""
    require(tensor.dtype in dtypes, what, f"{name} is {names([tensor.dtype])}; it takes {names(dtypes)}")
    require(tensor.dim() in dims, what, f"{name} has {tensor.dim()} axes; it takes {' or '.join(map(str, dims))}")


def check_grouped(
    x: Tensor,
    weight: Sequence[Tensor],
    group_list: Tensor,
    *,
    split_item: int = 2,
    group_type: int = 0,
    group_list_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> None:
    """``npu_grouped_matmul`` of one ``x[R, K]``, cut along rows, with one ``[E, K, N]`` or with one ``[K, N]`` for each of several experts.

    That the counts of rows end at ``R``, as they must, cannot be seen without waiting for the device.

    Raises:
        ValueError: what the documents forbid for that case.
    """
    what = "npu_grouped_matmul"
    check_kind(what, "x", x, FLOATS, 2)
    check_kind(what, "group_list", group_list, (torch.int64,), 1)
    require(x.is_contiguous(), what, f"x has strides {list(x.stride())}; it must be contiguous (only the weight may be transposed)")
    require(0 < len(weight) <= MAX_LIST, what, f"{len(weight)} weights; 1 to {MAX_LIST}, or one [E, K, N]")
    first = weight[0]
    whole = len(weight) == 1
    for one in weight:
        check_kind(what, "weight", one, FLOATS, 3 if whole else 2)
        laid = one.is_contiguous() or one.transpose(-1, -2).is_contiguous()
        require(laid, what, f"a weight {list(one.shape)} has strides {list(one.stride())}; it must be contiguous, or its transpose must be")
        require(one.dtype == x.dtype, what, f"weight is {names([one.dtype])} and x {names([x.dtype])}; they must be the same")
        same = one.shape == first.shape and one.stride() == first.stride()
        require(same, what, f"weights {list(first.shape)} and {list(one.shape)}, strides {first.stride()} and {one.stride()}; they must be alike")
    experts = first.shape[0] if whole else len(weight)
    k, n = first.shape[-2:]
    require(x.shape[1] == k, what, f"x has {x.shape[1]} columns and weights {[k, n]}; x[R, K] and [K, N] go together")
    last = n if first.is_contiguous() else k
    require(max(k, last) < INNER, what, f"weights {[k, n]}: the last axis of an operand, as it lies in memory, stays below {INNER}")
    require(whole or x.dtype != torch.float32, what, f"float32 with {len(weight)} weights; it takes one [E, K, N], or half-width types")
    require(split_item in (2, 3), what, f"split_item {split_item}; one result from one x needs 2 or 3")
    require(group_type == 0, what, f"group_type {group_type}; rows in groups are group_type 0")
    require(group_list_type in (0, 1), what, f"group_list_type {group_list_type}; 0 (cumulative) and 1 (counts) are for these element types")
    require(group_list.shape[0] == experts, what, f"group_list has {group_list.shape[0]} entries for {experts} experts")
    require(experts <= MAX_GROUPS, what, f"{experts} experts; at most {MAX_GROUPS}")
    require(group_list_type == 0 or experts > 1, what, "group_list_type 1 with one expert; use 0, the cumulative counts")
    wide = output_dtype is None or output_dtype == x.dtype
    require(wide, what, f"output_dtype {output_dtype} from {names([x.dtype])}; it gives the type of x")


def check_permute(tokens: Tensor, indices: Tensor, *, padded_mode: bool = False) -> None:
    """``npu_moe_token_permute``: ``tokens[T, H]`` by ``indices[T, k]``.

    Raises:
        ValueError: what the documents forbid.
    """
    what = "npu_moe_token_permute"
    check_kind(what, "tokens", tokens, (torch.bfloat16,), 2)
    check_kind(what, "indices", indices, (torch.int64,), 2)
    require(indices.shape[0] == tokens.shape[0], what, f"indices has {indices.shape[0]} rows for {tokens.shape[0]} tokens")
    require(1 <= indices.shape[1] <= MAX_TOP_K, what, f"{indices.shape[1]} choices of a token; 1 to {MAX_TOP_K}")
    require(indices.numel() < MAX_INDICES, what, f"{indices.numel()} choices; below {MAX_INDICES}")
    require(not padded_mode, what, "padded_mode; only False is implemented")


def check_unpermute(permuted: Tensor, sorted_indices: Tensor, *, probs: Tensor | None = None, padded_mode: bool = False) -> None:
    """``npu_moe_token_unpermute`` as a move: without ``probs`` each row goes to one place.

    Raises:
        ValueError: what the documents forbid, and ``probs``: the operator would add a token's rows in the order of its choices.
    """
    what = "npu_moe_token_unpermute"
    check_kind(what, "permuted_tokens", permuted, (torch.bfloat16,), 2)
    # The wheel describes this operator twice, once with int64. Both examples pass int32, and it is what npu_moe_token_permute returns.
    check_kind(what, "sorted_indices", sorted_indices, (torch.int32,), 1)
    same = sorted_indices.shape[0] == permuted.shape[0]
    require(same, what, f"{sorted_indices.shape[0]} indices for {permuted.shape[0]} rows")
    require(not padded_mode, what, "padded_mode; only False is implemented")
    require(probs is None, what, "probs: the rows of a token would be added in the order of its choices, not in the tree of experts; leave it out and combine")


def check_rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> None:
    """``npu_rms_norm`` of ``x[..., H]`` with ``gamma[H]``.

    Raises:
        ValueError: what the documents forbid.
    """
    what = "npu_rms_norm"
    check_kind(what, "x", x, FLOATS, *range(2, MAX_DIMS + 1))
    check_kind(what, "gamma", gamma, FLOATS, 1)
    require(gamma.dtype == x.dtype, what, f"gamma is {names([gamma.dtype])} and x {names([x.dtype])}; they must be the same")
    require(gamma.shape[0] == x.shape[-1], what, f"gamma has {gamma.shape[0]} entries and x {list(x.shape)}; the last axis is normalised")
    require(x.numel() > 0, what, f"x {list(x.shape)} is empty")
    require(epsilon >= 0, what, f"epsilon {epsilon}; at least 0")


def check_page_write(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *, cache_mode: str = "Norm") -> None:
    """``npu_scatter_pa_kv_cache`` of ``k, v[T, G, D]`` into ``[pages, page, G, D]`` each, without format conversion.

    Raises:
        ValueError: what the documents forbid. That slots lie inside the cache and are not repeated cannot be seen without waiting for the device.
    """
    what = "npu_scatter_pa_kv_cache"
    require(cache_mode == "Norm", what, f"cache_mode {cache_mode!r}: fractal pages need a conversion in every step; use 'Norm'")
    for name, tensor, dims in (("key", k, 3), ("value", v, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4)):
        check_kind(what, name, tensor, FLOATS, dims)
        require(tensor.dtype == k.dtype, what, f"{name} is {names([tensor.dtype])} and key {names([k.dtype])}; they must be the same")
        require(tensor.is_contiguous(), what, f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    check_kind(what, "slot_mapping", slots, (torch.int32, torch.int64), 1)
    require(slots.is_contiguous(), what, f"slot_mapping has strides {list(slots.stride())}; it must be contiguous")
    require(v.shape[:2] == k.shape[:2], what, f"key {list(k.shape)} and value {list(v.shape)}; tokens and heads must be the same")
    paged = f"key_cache {list(key_cache.shape)} and value_cache {list(value_cache.shape)}; pages and their size, the first two axes, must be the same"
    require(key_cache.shape[:2] == value_cache.shape[:2], what, paged)
    for name, one, cache in (("key", k, key_cache), ("value", v, value_cache)):
        require(cache.shape[2:] == one.shape[1:], what, f"{name} {list(one.shape)} into pages {list(cache.shape)}; [pages, page, heads, size] is expected")
    require(slots.shape[0] == k.shape[0], what, f"{slots.shape[0]} slots for {k.shape[0]} tokens")

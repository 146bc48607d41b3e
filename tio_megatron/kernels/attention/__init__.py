"""Causal attention: dense, packed, chunked, and over pages. One definition (``reference.py``), so one result for all of them.

Heads are never summed and keys are visited in the order of their positions, in blocks counted from the start of the sequence; so batch,
packing, chunks, page size, tensor-parallel head cuts and threads cannot change a byte. Merging partial softmaxes is not here, on purpose.

``T`` query tokens, ``S`` keys, ``H`` query heads, ``G`` key/value heads (H a multiple of G), ``D`` head size, ``B`` sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.contract.families import FAMILIES
from tio_megatron.kernels.attention import cpu
from tio_megatron.kernels.operands import check_activations, check_dtype, check_shape, require

__all__ = ["KV_BLOCK", "attention", "attention_backward", "attention_paged", "write_pages"]

KV_BLOCK = FAMILIES["cpu"].fields["kv_block"]
"""Keys per block of the walk."""
MAX_HEAD = 256


def _check_heads(what: str, heads: int, groups: int, size: int) -> None:
    if groups < 1 or heads % groups:
        raise ValueError(f"{what}: {heads} query heads are not a multiple of {groups} key/value heads")
    if not 16 <= size <= MAX_HEAD or size % 16:
        raise ValueError(f"{what}: head size {size} is not supported; a multiple of 16 up to {MAX_HEAD} is")


def _check_starts(what: str, tokens: int, keys: int, cu_q: Tensor, cu_k: Tensor) -> None:
    for name, starts in (("cu_q", cu_q), ("cu_k", cu_k)):
        check_dtype(what, name, starts, torch.int32)
        check_shape(what, name, starts, *cu_q.shape)
    require(cu_q.dim() == 1 and cu_q.numel() >= 1, what, f"cu_q has shape {list(cu_q.shape)}; expected [sequences + 1]")
    if not (cu_q.is_cpu and cu_k.is_cpu):
        return  # reading them would wait for the device
    q, k = cu_q.tolist(), cu_k.tolist()
    require(
        q[0] == 0 and k[0] == 0 and q[-1] == tokens and k[-1] == keys,
        what,
        f"cu_q ends at {q[-1]} of {tokens} tokens, cu_k at {k[-1]} of {keys} keys; they must start at 0 and end there",
    )
    for i in range(len(q) - 1):
        a, b = q[i + 1] - q[i], k[i + 1] - k[i]
        require(0 <= a <= b, what, f"sequence {i} has {a} query tokens and {b} keys; a query token is also a key, so there must be at least as many")


def _check_dense(what: str, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    check_activations(what, {"q": q, "k": k, "v": v})
    check_shape(what, "q", q, -1, -1, -1)
    check_shape(what, "k", k, -1, -1, q.shape[2])
    check_shape(what, "v", v, *k.shape)
    _check_heads(what, q.shape[1], k.shape[1], q.shape[2])
    _check_starts(what, q.shape[0], k.shape[0], cu_q, cu_k)


def attention(q: Tensor, k: Tensor, v: Tensor, *, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of sequences laid end to end. Differentiable in q, k and v through ``o`` (not through ``lse``).

    Args:
        q: ``[T, H, D]`` fp32 or bf16; tokens and heads may be strided. D a multiple of 16, at most 256.
        k, v: ``[S, G, D]``, the same type.
        cu_q, cu_k: ``[B + 1]`` int32, where each sequence starts. A sequence with a query tokens and b keys is a chunk: its row i sees the
            keys 0 .. b - a + i.
        scale: multiplies the scores.

    Returns:
        ``o[T, H, D]`` contiguous in the type of q, and ``lse[T, H]`` fp32, the logarithm of the sum of exponentials of the scaled scores.

    Raises:
        ValueError: shapes, types, device or lengths do not fit.
    """
    _check_dense("attention", q, k, v, cu_q, cu_k)
    return cpu.attention(q, k, v, cu_q, cu_k, scale)


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` in the types of q, k, v. Probabilities are computed again as ``exp(s - lse)``.

    dq is summed over key blocks ascending; dk and dv over query blocks ascending, then over the heads of the group ascending; all in fp32
    with one rounding at the end.

    Args:
        do, o: ``[T, H, D]``; lse: ``[T, H]`` fp32, from :func:`attention`.
        q, k, v, cu_q, cu_k, scale: as given to it.

    Raises:
        ValueError: shapes, types, device or lengths do not fit.
    """
    _check_dense("attention_backward", q, k, v, cu_q, cu_k)
    check_activations("attention_backward", {"q": q, "do": do, "o": o})
    check_shape("attention_backward", "do", do, *q.shape)
    check_shape("attention_backward", "o", o, *q.shape)
    check_dtype("attention_backward", "lse", lse, torch.float32)
    check_shape("attention_backward", "lse", lse, *q.shape[:2])
    return cpu.attention_backward(do, q, k, v, o, lse, cu_q, cu_k, scale)


def write_pages(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Put keys and values into pages. The layout inside a page is this package's own: only :func:`attention_paged` reads it.

    Args:
        k, v: ``[T', G, D]``, tokens and heads may be strided; tokens past the slots are ignored.
        cache: ``[pages, G, page, 2 * D]`` of the same type, each page contiguous; page a multiple of 64.
        slot_mapping: ``[T]`` int64, page number * page + place; negative: skipped.

    Raises:
        ValueError: shapes, types or device do not fit, or a slot is outside the cache.
    """
    _check_cache("write_pages", cache, k.shape[-1])
    check_activations("write_pages", {"cache": cache, "k": k, "v": v})
    check_shape("write_pages", "k", k, -1, cache.shape[1], cache.shape[3] // 2)
    check_shape("write_pages", "v", v, *k.shape)
    check_dtype("write_pages", "slot_mapping", slot_mapping, torch.int64)
    check_shape("write_pages", "slot_mapping", slot_mapping, -1)
    if slot_mapping.shape[0] > k.shape[0]:
        raise ValueError(f"write_pages: {slot_mapping.shape[0]} slots for {k.shape[0]} tokens")
    cpu.write_pages(k, v, cache, slot_mapping)


def attention_paged(
    q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, *, scale: float, out: Tensor | None = None
) -> Tensor:
    """:func:`attention` over pages, forward only: the last ``query_start_loc[i + 1] - query_start_loc[i]`` of the ``seq_lens[i]`` positions of
    each sequence are the query rows.

    Args:
        q: ``[T, H, D]``; rows past ``query_start_loc[-1]`` are padding and not read.
        cache: as in :func:`write_pages`; places past a sequence's length are never part of a result.
        block_table: ``[B', *]`` int32, the pages of each sequence (more rows than sequences are allowed, and unused entries).
        seq_lens: ``[B']`` int32, keys of each sequence, the query tokens included.
        query_start_loc: ``[B + 1]`` int32.
        scale: multiplies the scores.
        out: ``[T, H, D]`` or ``[T, H * D]`` to write into, contiguous in its last axis; padding rows are left as they are.

    Returns:
        ``out``, or a new ``[T, H, D]`` with padding rows +0.

    Raises:
        ValueError: shapes, types or device do not fit, or a page number is outside the cache.
    """
    what = "attention_paged"
    check_shape(what, "q", q, -1, -1, -1)
    _check_cache(what, cache, q.shape[2])
    _check_heads(what, q.shape[1], cache.shape[1], q.shape[2])
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        check_dtype(what, name, tensor, torch.int32)
    result = q.new_zeros(q.shape) if out is None else out
    check_activations(what, {"q": q, "cache": cache, "out": result})
    if result.numel() != q.numel() or result.shape[0] != q.shape[0] or result.stride(-1) != 1:
        raise ValueError(
            f"{what}: out has shape {list(result.shape)} and strides {list(result.stride())} for q {list(q.shape)}; its last axis must be contiguous"
        )
    sequences = query_start_loc.shape[0] - 1
    if sequences < 0 or block_table.dim() != 2 or min(block_table.shape[0], seq_lens.shape[0]) < sequences:
        raise ValueError(f"{what}: {sequences} sequences, block_table {list(block_table.shape)}, seq_lens {list(seq_lens.shape)}")
    cpu.attention_paged(q, cache, block_table, seq_lens, query_start_loc, scale, result.view(q.shape))
    return result


def _check_cache(what: str, cache: Tensor, size: int) -> None:
    check_shape(what, "cache", cache, -1, -1, -1, 2 * size)
    if cache.shape[2] % KV_BLOCK or not cache.shape[2]:
        raise ValueError(f"{what}: pages of {cache.shape[2]} keys; a multiple of {KV_BLOCK} is needed")
    if not cache.is_contiguous() and not cache[0].is_contiguous():
        raise ValueError(f"{what}: a page must be contiguous; cache has strides {list(cache.stride())}")

"""Attention on an NPU: one call of the device for each of training, its gradient, a page write, and prefill or decode over pages.

*Built, not run.* Every call attends to the visible keys alone, from position 0, and asks for no key split: packed layout ``TND``, the causal mode
aligned at the last key (whole sequences, chunks and one token are the same mode), fp32 statistics. That training and inference then agree in every byte
is the definition of the family (``kernels/npu/twin_attention.py``); whether a device's operators do is what ``ascend_selfcheck`` asks.

Costs: the mask is made once for a device, lengths are read from host tensors once a step, pages are written by one call for keys and values, nothing changes
its memory format and nothing waits for the device.

``T`` query tokens, ``S`` keys, ``H`` query heads, ``G`` key/value heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tio_megatron.kernels import npu_family
from tio_megatron.kernels.npu import masks
from tio_megatron.kernels.npu.calls import FLASH, find
from tio_megatron.kernels.npu.lengths import lengths_of, numbers, on_device, starts
from tio_megatron.kernels.npu.limits import check_page_write
from tio_megatron.kernels.npu.limits_inference import check_inference
from tio_megatron.kernels.npu.limits_training import check_training
from tio_megatron.kernels.operands import require

LAYOUT = "TND"
PAGES = "Norm"
"""Pages as they are read, not fractal ones, which would need a conversion in every step."""


def attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``o[T, H, D]`` and ``lse[T, H]`` of packed sequences, for training and for scoring; ``tio::attention``.

    Args:
        q, k, v: ``[T, H, D]``, ``[S, G, D]``, ``[S, G, D]`` bf16.
        cu_q, cu_k: ``[B + 1]`` int32 on the host, cumulative starts.
        scale: multiplies the scores.

    Raises:
        ValueError: the documents forbid the shapes or types, or lengths are on the device.
    """
    if npu_family.route() != "vendor":
        return _flash(q, k, v, cu_q, cu_k, scale)
    seen = _seen("attention", q, k, v, cu_q, cu_k)
    # Without softmax_layout the statistics lie heads first in memory, under a shape that says tokens first.
    o, top, total, *_ = find("npu_fusion_attention")(q, k, v, q.shape[1], LAYOUT, scale=scale, softmax_layout=LAYOUT, **seen)
    return o, top[..., 0] + total[..., 0].log()


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv``; ``tio::attention_backward``.

    The statistics go in as maximum = lse and sum = 1: ``exp(s - lse) / 1`` is the same probability. The vendor adds the parts of dq with
    atomic additions unless the deterministic level is 1 or more, and publishes no order; ``integrations.ascend.switches`` sets the level.

    Raises:
        ValueError: as :func:`attention`.
    """
    if npu_family.route() != "vendor":
        return _flash_backward(do, q, k, v, o, lse, cu_q, cu_k, scale)
    seen = _seen("attention_backward", q, k, v, cu_q, cu_k)
    top = lse.unsqueeze(-1).expand(*lse.shape, 8).contiguous()
    dq, dk, dv, *_ = find("npu_fusion_attention_grad")(
        q,
        k,
        v,
        do,
        q.shape[1],
        LAYOUT,
        softmax_max=top,
        softmax_sum=torch.ones_like(top),
        attention_in=o,
        scale_value=scale,
        softmax_layout=LAYOUT,
        **seen,
    )
    return dq, dk, dv


def pools(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The key pages and the value pages, ``[pages, page, G, D]`` each, inside ``cache[pages, G, page, 2 * D]``.

    The operators want the two apart, so its first half holds all keys and its second all values: a page of the cache is not a page's
    bytes, and pages must not be copied by their number.

    Raises:
        ValueError: the cache is not contiguous.
    """
    pages, groups, page, width = cache.shape
    require(cache.is_contiguous(), "pages", f"the cache has strides {list(cache.stride())}; on an NPU it must be contiguous")
    keys, values = cache.view(2, pages, page, groups, width // 2).unbind(0)
    return keys, values


def write_pages(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Keys and values into pages, both in one call; ``tio::write_pages``. Slots must lie inside the cache: a device does not look.

    Negative slots, which other devices skip, and repeated ones are outside what the operator's documents allow: leave padding tokens out.

    Raises:
        ValueError: the documents forbid the shapes or types.
    """
    keys, values = pools(cache)
    tokens = slot_mapping.shape[0]
    k, v = k[:tokens].contiguous(), v[:tokens].contiguous()
    check_page_write(k, v, keys, values, slot_mapping, cache_mode=PAGES)
    find("npu_scatter_pa_kv_cache")(k, v, keys, values, slot_mapping, cache_mode=PAGES)


def attention_paged(q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, scale: float, out: Tensor) -> None:
    """Prefill, chunks and decode over pages into ``out[T, H, D]``; ``tio::attention_paged``. Rows past the last sequence are left as they are.

    Raises:
        ValueError: the documents forbid the shapes or types, or lengths are on the device.
    """
    what = "attention_paged"
    ends = numbers(what, "query_start_loc", query_start_loc)[1:]
    sequences = len(ends)
    if not sequences or not ends[-1]:
        return
    counts = numbers(what, "seq_lens", seq_lens)[:sequences]
    rows = q[: ends[-1]].contiguous()
    keys, values = pools(cache)
    table = block_table[:sequences]
    mask = masks.causal(q.device)
    flat = [pool.flatten(2) for pool in (keys, values)]
    heads, groups, page = q.shape[1], keys.shape[2], keys.shape[1]
    check_inference(
        rows,
        *flat,
        version=2,
        input_layout=LAYOUT,
        num_heads=heads,
        num_key_value_heads=groups,
        atten_mask=mask,
        sparse_mode=masks.CAUSAL,
        actual_seq_qlen=ends,
        actual_seq_kvlen=counts,
        block_table=table,
        block_size=page,
        shared_pages=True,  # prefix caching: see docs/ascend.md, "What nobody has run yet"
    )
    if npu_family.route() != "vendor":
        o = _flash_paged(rows, keys, values, table, counts, query_start_loc, seq_lens, scale)
    else:
        o, _ = find("npu_fused_infer_attention_score_v2")(
            rows,
            *flat,
            atten_mask=mask,
            actual_seq_qlen=ends,
            actual_seq_kvlen=counts,
            block_table=table,
            num_query_heads=heads,
            num_key_value_heads=groups,
            softmax_scale=scale,
            input_layout=LAYOUT,
            sparse_mode=masks.CAUSAL,
            block_size=page,
        )
    out[: ends[-1]].copy_(o.view(rows.shape))


def attention_dense(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """:func:`attention` by the inference operator, where keys are not in pages (scoring in a rollout, encoders of whole prompts). Forward only.

    Raises:
        ValueError: as :func:`attention`.
    """
    ends_q, ends_k = _ends("attention_dense", q, k, cu_q, cu_k)
    mask = masks.causal(q.device)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    lengths: dict[str, Any] = {"actual_seq_qlen": ends_q, "actual_seq_kvlen": ends_k}
    rest: dict[str, Any] = {"input_layout": LAYOUT, "num_key_value_heads": k.shape[1], "atten_mask": mask, "sparse_mode": masks.CAUSAL}
    check_inference(q, k, v, version=2, num_heads=q.shape[1], **rest, **lengths)
    operator = find("npu_fused_infer_attention_score_v2")
    o, lse = operator(q, k, v, num_query_heads=q.shape[1], softmax_scale=scale, return_softmax_lse=True, **rest, **lengths)
    return o, lse.squeeze(-1)


def _ends(what: str, q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cumulative ends of the sequences that have a token."""
    queries, keys = starts(what, "cu_q", cu_q, q.shape[0]), starts(what, "cu_k", cu_k, k.shape[0])
    kept = [i for i, (a, b) in enumerate(zip(queries.counts, keys.counts, strict=True)) if a or b]
    return tuple(queries.ends[i] for i in kept), tuple(keys.ends[i] for i in kept)


def _seen(what: str, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> dict[str, Any]:
    """Which keys each query sees, as arguments of the vendor's training operator, for which they and the operands have been checked."""
    ends_q, ends_k = _ends(what, q, k, cu_q, cu_k)
    seen: dict[str, Any] = {"atten_mask": masks.causal(q.device), "sparse_mode": masks.CAUSAL, "actual_seq_qlen": ends_q, "actual_seq_kvlen": ends_k}
    check_training(q, k, v, q.shape[1], LAYOUT, **seen)
    return seen


def _laid(what: str, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> dict[str, Any]:
    """The same for flash-attention-npu. Its own limits are not published; what the vendor's operator forbids in the same call is asked of it too."""
    seen = _seen(what, q, k, v, cu_q, cu_k)
    return {
        "cu_seqlens_q": on_device(cu_q, q.device),
        "cu_seqlens_k": on_device(cu_k, q.device),
        "max_seqlen_q": max(lengths_of(seen["actual_seq_qlen"])),
        "max_seqlen_k": max(lengths_of(seen["actual_seq_kvlen"])),
    }


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    laid = _laid("attention", q, k, v, cu_q, cu_k)
    o, lse, *_ = find("_flash_attn_forward", FLASH)(q, k, v, softmax_scale=scale, causal=True, num_splits=1, **laid)
    return o, lse.t().contiguous()


def _flash_paged(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, counts: tuple[int, ...], query_start_loc: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    ends = numbers("attention_paged", "query_start_loc", query_start_loc)[1:]
    o, *_ = find("_flash_attn_forward", FLASH)(
        q,
        keys,
        values,
        cu_seqlens_q=on_device(query_start_loc, q.device),
        seqused_k=on_device(seq_lens, q.device)[: len(counts)],
        max_seqlen_q=max(lengths_of(ends)),
        max_seqlen_k=max(counts),
        page_table=table,
        softmax_scale=scale,
        causal=True,
        num_splits=1,
    )
    return o


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    laid = _laid("attention_backward", q, k, v, cu_q, cu_k)
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    find("_flash_attn_backward", FLASH)(
        do,
        q,
        k,
        v,
        o,
        lse.t().contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale,
        is_causal=True,
        deterministic=True,
        **laid,
    )
    return dq, dk, dv


KERNELS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "attention_backward": attention_backward,
    "write_pages": write_pages,
    "attention_paged": attention_paged,
}

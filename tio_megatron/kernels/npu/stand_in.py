"""The NPU's operators without an NPU: the table's schemas, defined in torch, with the CPU twins behind them.

After :func:`install` the kernels of ``kernels/<op>/npu.py`` run on CPU tensors as they would on a device: torch itself checks every call against the
schemas. For tests and for ``ascend_selfcheck --twin``. Never beside torch_npu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tio_megatron.kernels.npu import twin
from tio_megatron.kernels.npu.calls import FLASH, find
from tio_megatron.kernels.npu.masks import CAUSAL
from tio_megatron.kernels.npu.schemas import FLASH_SCHEMAS, SCHEMAS
from tio_megatron.kernels.npu.twin_attention import attend, gradients

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Define the operators for this process. Doing it again is harmless.

    Raises:
        RuntimeError: torch_npu is loaded: its operators are the real ones.
    """
    if _libraries:
        return
    if hasattr(torch.ops.npu, "npu_rms_norm"):
        raise RuntimeError("stand_in: torch_npu's operators are registered in this process already")
    for namespace, schemas in (("npu", SCHEMAS), (FLASH, FLASH_SCHEMAS)):
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            name = schema.split("::")[1].split("(")[0]
            library.define(schema.split("::")[1])
            library.impl(name, _by_name(getattr(getattr(torch.ops, namespace), name).default, TWINS[name]), "CPU")
        _libraries.append(library)
    find.cache_clear()


def _by_name(operator: Any, twin_of: Callable[[SimpleNamespace], Any]) -> Callable[..., Any]:
    """The twin, given every argument by its name in the schema, defaults included."""
    arguments = operator._schema.arguments

    def run(*positional: Any, **named: Any) -> Any:
        values = {a.name: a.default_value for a in arguments if a.has_default_value()}
        values |= {a.name: value for a, value in zip(arguments, positional, strict=False)} | named
        return twin_of(SimpleNamespace(**values))

    return run


def installed() -> bool:
    """Whether this process calculates with the twins."""
    return bool(_libraries)


def _sequences(what: str, layout: str, ends_q: Sequence[int], ends_k: Sequence[int]) -> list[tuple[slice, slice]]:
    if layout != "TND":
        raise ValueError(f"{what}: the twin has layout TND alone, not {layout!r}")
    cuts = [[slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)] for ends in (ends_q, ends_k)]
    return list(zip(*cuts, strict=True))


def _empty(q: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_zeros(*q.shape[:2], size), q.new_zeros(q.shape[:2], dtype=torch.float32), q.new_zeros(q.shape[:2], dtype=torch.float32)


def _over(q: Tensor, k: Tensor, v: Tensor, cuts: list[tuple[slice, slice]], scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    o, top, total = _empty(q, v.shape[-1])
    for rows, keys in cuts:
        if rows.start < rows.stop:
            o[rows], top[rows], total[rows] = attend(q[rows], k[keys], v[keys], scale, causal=causal)
    return o, top, total


def _causal(what: str, mode: int) -> bool:
    if mode not in (0, CAUSAL):
        raise ValueError(f"{what}: the twin has sparse modes 0 and {CAUSAL}, not {mode}")
    return mode == CAUSAL


def _training(a: SimpleNamespace) -> Any:
    what = "npu_fusion_attention"
    cuts = _sequences(what, a.input_layout, a.actual_seq_qlen, a.actual_seq_kvlen)
    o, top, total = _over(a.query, a.key, a.value, cuts, a.scale, _causal(what, a.sparse_mode))
    kept = [t.unsqueeze(-1).repeat(1, 1, 8) for t in (top, total)]
    if a.softmax_layout != "TND":  # the bytes lie heads first then, under a shape that says tokens first
        kept = [t.transpose(0, 1).contiguous().view(t.shape) for t in kept]
    return (o, *kept, a.query.new_empty(0), 0, 0, 0)


def _training_gradient(a: SimpleNamespace) -> Any:
    what = "npu_fusion_attention_grad"
    _causal(what, a.sparse_mode)
    out = tuple(torch.zeros_like(t) for t in (a.query, a.key, a.value))
    cuts = _sequences(what, a.input_layout, a.actual_seq_qlen, a.actual_seq_kvlen)
    top, total = a.softmax_max[..., 0], a.softmax_sum[..., 0]
    for rows, keys in cuts:
        parts = gradients(a.dy[rows], a.query[rows], a.key[keys], a.value[keys], top[rows], total[rows], a.scale_value)
        for whole, part, where in zip(out, parts, (rows, keys, keys), strict=True):
            whole[where] = part
    return (*out, a.query.new_empty(0), a.query.new_empty(0))


def _inference(
    what: str, a: SimpleNamespace, ends_q: Sequence[int], given_k: Sequence[int], scale: float, layout: str, table: Tensor | None, groups: int, mode: int
) -> tuple[Tensor, Tensor, Tensor]:
    causal = _causal(what, mode)
    cuts = _sequences(what, layout, ends_q, ends_q if table is not None else given_k)
    if table is None:
        return _over(a.query, a.key, a.value, cuts, scale, causal)
    o, top, total = _empty(a.query, a.query.shape[-1])
    for i, (rows, _) in enumerate(cuts):
        if rows.start < rows.stop:
            keys, values = (_gather(cache, table[i], given_k[i], groups, a.query.shape[-1]) for cache in (a.key, a.value))
            o[rows], top[rows], total[rows] = attend(a.query[rows], keys, values, scale, causal=causal)
    return o, top, total


def _gather(cache: Tensor, table: Tensor, keys: int, heads: int, size: int) -> Tensor:
    """``[keys, heads, size]`` from ``cache[pages, page, heads * size]`` or ``[pages, page, heads, size]``."""
    return cache[table[: -(-keys // cache.shape[1])].long()].reshape(-1, heads, size)[:keys]


def _lse(top: Tensor, total: Tensor, wanted: bool = True) -> Tensor:
    return (top + total.log()).unsqueeze(-1) if wanted else torch.zeros(1)


def _inference_1(a: SimpleNamespace) -> Any:
    lengths, rest = (a.actual_seq_lengths, a.actual_seq_lengths_kv), (a.block_table, a.num_key_value_heads, a.sparse_mode)
    o, top, total = _inference("npu_fused_infer_attention_score", a, *lengths, a.scale, a.input_layout, *rest)
    return o, _lse(top, total, a.softmax_lse_flag)


def _inference_2(a: SimpleNamespace) -> Any:
    lengths, rest = (a.actual_seq_qlen, a.actual_seq_kvlen), (a.block_table, a.num_key_value_heads, a.sparse_mode)
    o, top, total = _inference("npu_fused_infer_attention_score_v2", a, *lengths, a.softmax_scale, a.input_layout, *rest)
    return o, _lse(top, total, a.return_softmax_lse)


def _flash(a: SimpleNamespace) -> Any:
    named = SimpleNamespace(query=a.q, key=a.k, value=a.v)
    keys = a.cu_seqlens_k.tolist()[1:] if a.page_table is None else a.seqused_k.tolist()
    o, top, total = _inference("flash_attn", named, a.cu_seqlens_q.tolist()[1:], keys, a.softmax_scale, "TND", a.page_table, a.k.shape[-2], CAUSAL)
    return o, _lse(top, total).squeeze(-1).t().contiguous(), a.q.new_empty(0), a.q.new_empty(0)


def _flash_gradient(a: SimpleNamespace) -> Tensor:
    lse = a.softmax_lse.t()
    for rows, keys in _sequences("flash_attn", "TND", a.cu_seqlens_q.tolist()[1:], a.cu_seqlens_k.tolist()[1:]):
        parts = gradients(a.dout[rows], a.q[rows], a.k[keys], a.v[keys], lse[rows], torch.ones_like(lse[rows]), a.softmax_scale)
        for whole, part, where in zip((a.dq, a.dk, a.dv), parts, (rows, keys, keys), strict=True):
            whole[where] = part
    return a.softmax_lse.new_empty(0)


def _page_write(a: SimpleNamespace) -> None:
    for rows, cache in ((a.key, a.key_cache), (a.value, a.value_cache)):
        cache.view(-1, *cache.shape[2:])[a.slot_mapping.long()] = rows


def _grouped(a: SimpleNamespace) -> list[Tensor]:
    ends = a.group_list if a.group_list_type == 0 else a.group_list.cumsum(0)
    return [twin.grouped(a.x[0], a.weight if a.weight[0].dim() == 2 else a.weight[0], ends.tolist())]


def _permute(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    rows, where = twin.permute(a.tokens, a.indices)
    return rows[: a.num_out_tokens] if a.num_out_tokens else rows, where


TWINS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "npu_fusion_attention": _training,
    "npu_fusion_attention_grad": _training_gradient,
    "npu_fused_infer_attention_score": _inference_1,
    "npu_fused_infer_attention_score_v2": _inference_2,
    "npu_scatter_pa_kv_cache": _page_write,
    "npu_grouped_matmul": _grouped,
    "npu_moe_token_permute": _permute,
    "npu_moe_token_unpermute": lambda a: a.permuted_tokens[a.sorted_indices.long()],
    "npu_rms_norm": lambda a: twin.rms_norm(a.input, a.gamma, a.epsilon),
    "_flash_attn_forward": _flash,
    "_flash_attn_backward": _flash_gradient,
}

"""What every call of ours says to its operator, argument by argument. The CPU twins read few of them, a device all: a mask that is left out, a page that is
said to be fractal, keys that are split. So each call is compared with one table of what is meant; an argument that is not in it has its default.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tio_megatron.kernels.attention import npu as attention
from tio_megatron.kernels.grouped import npu as grouped
from tio_megatron.kernels.norm import npu as norm
from tio_megatron.kernels.npu import masks, permute
from tio_megatron.kernels.npu.calls import FLASH, find

HEADS, GROUPS, SIZE = 4, 2, 128
SCALE = SIZE**-0.5
COMPRESSED = [2048, 2048]
Q, K = [25, HEADS, SIZE], [25, GROUPS, SIZE]


class Arguments(TorchDispatchMode):
    """(operator, {argument: value}) of every NPU call, defaults left out; a tensor is its shape. ``masks`` holds the masks themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.masks: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace in ("npu", FLASH):
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self.masks += [value for name, value in given.items() if name == "atten_mask" and value is not None]
            defaults = {argument.name: argument.default_value for argument in func._schema.arguments if argument.has_default_value()}
            told = {name: self._plain(value) for name, value in given.items() if name not in defaults or not self._same(value, defaults[name])}
            self.seen.append((func._schema.name.split("::")[1], told))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _same(value: Any, default: Any) -> bool:
        return not isinstance(value, torch.Tensor) and value == default

    @staticmethod
    def _plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return list(value.shape)
        if isinstance(value, (list, tuple)):
            return [Arguments._plain(each) for each in value]
        return value


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return bf16(*Q), bf16(*K), bf16(*K), torch.tensor([0, 5, 25], dtype=torch.int32)


def calls() -> tuple[dict[str, list[tuple[str, dict[str, Any]]]], list[torch.Tensor]]:
    """Every entry of the package that calls an operator, and what it said."""
    q, k, v, starts = packed()
    cache = torch.zeros(4, GROUPS, 128, 2 * SIZE).bfloat16()
    table, lengths = torch.tensor([[3, 0], [2, 0]], dtype=torch.int32), torch.tensor([5, 20], dtype=torch.int32)
    x, w, ids = bf16(6, 256), [bf16(32, 256) for _ in range(4)], torch.tensor([[0, 3], [3, 1], [1, 0], [2, 3], [0, 2], [1, 2]])
    o, lse = attention.attention(q, k, v, starts, starts, SCALE)
    rows, where = permute.to_experts(x, ids)
    entries = {
        "attention": lambda: attention.attention(q, k, v, starts, starts, SCALE),
        "attention_backward": lambda: attention.attention_backward(o, q, k, v, o, lse, starts, starts, SCALE),
        "write_pages": lambda: attention.write_pages(k, v, cache, torch.arange(25)),
        "attention_paged": lambda: attention.attention_paged(q, cache, table, lengths, starts, SCALE, torch.empty_like(q)),
        "attention_dense": lambda: attention.attention_dense(q, k, v, starts, starts, SCALE),
        "norm": lambda: norm.add_rms_norm(x, x, bf16(256), 1e-5),
        "to_experts": lambda: permute.to_experts(x, ids),
        "from_experts": lambda: permute.from_experts(rows, where, 2),
        "grouped": lambda: grouped.grouped(rows, w, torch.tensor([0, 3, 6, 9, 12]), 1, False, torch.bfloat16),
    }
    found, seen = {}, []
    for name, call in entries.items():
        with Arguments() as recorder:
            call()
        found[name], seen = recorder.seen, seen + recorder.masks
    return found, seen


CAUSAL = {"atten_mask": COMPRESSED, "sparse_mode": 3, "actual_seq_qlen": [5, 25], "actual_seq_kvlen": [5, 25]}
TRAINING = {"query": Q, "key": K, "value": K, "head_num": HEADS, "input_layout": "TND", "softmax_layout": "TND"} | CAUSAL
STATISTICS = {"softmax_max": [25, HEADS, 8], "softmax_sum": [25, HEADS, 8], "attention_in": Q}
INFERENCE = {"query": Q, "num_query_heads": HEADS, "num_key_value_heads": GROUPS, "softmax_scale": SCALE, "input_layout": "TND"} | CAUSAL
POOL = [4, 128, GROUPS, SIZE]
FLAT = [4, 128, GROUPS * SIZE]
PAGES = {"key": FLAT, "value": FLAT, "block_table": [2, 2], "block_size": 128, "actual_seq_kvlen": [5, 20]}
WRITE = ("npu_scatter_pa_kv_cache", {"key": K, "value": K, "key_cache": POOL, "value_cache": POOL, "slot_mapping": [25], "cache_mode": "Norm"})
VENDOR: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "attention": [("npu_fusion_attention", TRAINING | {"scale": SCALE})],
    "attention_backward": [("npu_fusion_attention_grad", TRAINING | STATISTICS | {"dy": Q, "scale_value": SCALE})],
    "write_pages": [WRITE],
    "attention_paged": [("npu_fused_infer_attention_score_v2", INFERENCE | PAGES)],
    "attention_dense": [("npu_fused_infer_attention_score_v2", INFERENCE | {"key": K, "value": K, "return_softmax_lse": True})],
    "norm": [("npu_rms_norm", {"input": [6, 256], "gamma": [256], "epsilon": 1e-5})],
    "to_experts": [("npu_moe_token_permute", {"tokens": [6, 256], "indices": [6, 2], "num_out_tokens": 12})],
    "from_experts": [("npu_moe_token_unpermute", {"permuted_tokens": [12, 256], "sorted_indices": [12]})],
    "grouped": [("npu_grouped_matmul", {"x": [[12, 256]], "weight": [[256, 32]] * 4, "group_list": [4], "group_type": 0, "split_item": 2})],
}
VARIABLE = {"q": Q, "cu_seqlens_q": [3], "max_seqlen_q": 20, "max_seqlen_k": 20, "softmax_scale": SCALE}
LAID = VARIABLE | {"k": K, "v": K, "cu_seqlens_k": [3]}
GRADIENTS = {"dout": Q, "out": Q, "softmax_lse": [HEADS, 25], "dq": Q, "dk": K, "dv": K, "is_causal": True, "deterministic": True}
FLASH_CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = VENDOR | {
    "attention": [("_flash_attn_forward", LAID | {"causal": True})],
    "attention_backward": [("_flash_attn_backward", LAID | GRADIENTS)],
    "attention_paged": [("_flash_attn_forward", VARIABLE | {"k": POOL, "v": POOL, "seqused_k": [2], "page_table": [2, 2], "causal": True})],
}


def test_every_argument_of_every_call_is_meant(route: str) -> None:
    found, seen = calls()
    assert found == (VENDOR if route == "vendor" else FLASH_CALLS)
    assert all(mask is masks.causal(torch.device("cpu")) for mask in seen) and len(seen) == (4 if route == "vendor" else 1)


def test_splits_of_keys_are_off_in_the_schema_too() -> None:
    """An argument with its default is not in the table above; this one's must be the one that is meant."""
    for name in ("_flash_attn_forward",):
        defaults = {argument.name: argument.default_value for argument in find(name, FLASH)._schema.arguments if argument.has_default_value()}
        assert defaults["num_splits"] == 1


def test_a_true_entry_of_the_mask_is_a_key_that_is_not_seen() -> None:
    mask = masks.causal(torch.device("cpu"))
    later = torch.arange(2048)[None] > torch.arange(2048)[:, None]
    assert list(mask.shape) == COMPRESSED and mask.dtype == torch.bool and torch.equal(mask, later)


@pytest.mark.parametrize(
    ("operator", "change"),
    [
        ("npu_scatter_pa_kv_cache", {"cache_mode": "PA_NZ"}),
        ("npu_fusion_attention", {"atten_mask": None}),
        ("npu_fusion_attention", {"sparse_mode": 0}),
        ("npu_fusion_attention_grad", {"softmax_layout": ""}),
        ("npu_fused_infer_attention_score_v2", {"block_size": 16}),
        ("npu_fused_infer_attention_score_v2", {"num_key_value_heads": 0}),
        ("npu_grouped_matmul", {"group_type": -1}),
        ("npu_grouped_matmul", {"split_item": 0}),
    ],
)
def test_an_argument_that_the_twins_do_not_read_is_seen(operator: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the table tells each from the call that is meant, whatever the twin makes of it."""

    def altered(name: str, *where: str) -> Any:
        called = find(name, *where)
        return (lambda *args, **kwargs: called(*args, **(kwargs | change))) if name == operator else called

    for module in (attention, grouped, norm):
        monkeypatch.setattr(module, "find", altered)
    try:
        found, _ = calls()
    except (ValueError, RuntimeError):
        return  # this twin does read it
    assert found != VENDOR

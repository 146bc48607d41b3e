"""What torch_npu's documents forbid is refused by name before the device sees it; what they allow is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tio_megatron.kernels.npu import limits
from tio_megatron.kernels.npu.lengths import numbers, on_device, starts
from tio_megatron.kernels.npu.limits_inference import check_inference
from tio_megatron.kernels.npu.limits_training import check_training
from tio_megatron.kernels.npu.masks import causal

MASK = causal(torch.device("cpu"))


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def packed_training(**changes: Any) -> tuple[list, dict]:
    t = {"q": bf16(24, 8, 128), "k": bf16(24, 2, 128), "v": bf16(24, 2, 128), "head_num": 8, "input_layout": "TND"}
    t |= {"atten_mask": MASK, "sparse_mode": 3, "actual_seq_qlen": [8, 24], "actual_seq_kvlen": [8, 24]} | changes
    return [t.pop(name) for name in ("q", "k", "v", "head_num", "input_layout")], t


def dense_training(layout: str, **changes: Any) -> tuple[list, dict]:
    shapes = {"BSH": ((2, 16, 1024), (2, 16, 256)), "SBH": ((16, 2, 1024), (16, 2, 256)), "BSND": ((2, 16, 8, 128), (2, 16, 2, 128))}
    q, k = shapes.get(layout, ((2, 8, 16, 128), (2, 2, 16, 128)))
    t = {"q": bf16(*q), "k": bf16(*k), "v": bf16(*k), "head_num": 8, "input_layout": layout, "atten_mask": MASK, "sparse_mode": 2} | changes
    return [t.pop(name) for name in ("q", "k", "v", "head_num", "input_layout")], t


def accepted(table: list[tuple[Any, str]], call: Callable[[Any], None], start: str) -> list[tuple[str, str]]:
    """Rows of the table that are not refused in the words beside them: what should be said, and what is."""
    found = []
    for given, says in table:
        try:
            call(given)
            found.append((says, "nothing"))
        except ValueError as error:
            if says not in str(error) or not str(error).startswith(start):
                found.append((says, str(error)))
    return found


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("given", [{}, {"sparse_mode": 3}, {"sparse_mode": 0, "atten_mask": None}, {"sparse_mode": 1, "atten_mask": MASK[:16, :16]}])
def test_training_layouts_that_are_allowed(layout: str, given: dict) -> None:
    args, kwargs = dense_training(layout, **given)
    check_training(*args, **kwargs)


def test_packed_training_is_allowed() -> None:
    for given in ({}, {"sparse_mode": 0, "atten_mask": None}, {"sparse_mode": 0, "atten_mask": MASK[:16, :16]}, {"keep_prob": 0.9}):
        args, kwargs = packed_training(**given)
        check_training(*args, **kwargs)


TRAINING_REFUSED = [
    ({"input_layout": "XYZ"}, "layout 'XYZ'; it takes BSH, SBH, BSND, BNSD, TND"),
    ({"input_layout": "TND_NTD"}, "layout"),
    ({"q": torch.empty(24, 8, 128, dtype=torch.float64)}, "query is float64"),
    ({"k": torch.empty(24, 2, 128, dtype=torch.float16)}, "key is float16 and query bfloat16"),
    ({"q": bf16(2, 24, 8, 128)}, "query has 4 axes"),
    ({"head_num": 4}, "head_num 4, but the query has 8 heads"),
    ({"head_num": 0}, "0 query heads; 1 to 256"),
    ({"q": bf16(24, 8, 0)}, "a head of 0"),
    ({"head_num": 257, "q": bf16(24, 257, 128)}, "257 query heads; 1 to 256"),
    ({"k": bf16(24, 3, 128), "v": bf16(24, 3, 128)}, "8 query heads are not a multiple of 3"),
    ({"k": bf16(24, 2, 64), "v": bf16(24, 2, 64)}, "head size 128 of the query and 64 of the key"),
    ({"v": bf16(24, 2, 192)}, "the value's at most the key's"),
    ({"q": bf16(24, 8, 800), "k": bf16(24, 2, 800), "v": bf16(24, 2, 800)}, "at most 768"),
    ({"v": bf16(23, 2, 128)}, "differ"),
    ({"actual_seq_qlen": None}, "needs actual_seq_qlen"),
    ({"actual_seq_qlen": [0, 8, 24]}, "without the leading 0"),
    ({"actual_seq_qlen": [8, 16]}, "ends at 16 of 24"),
    ({"actual_seq_qlen": [24, 8]}, "must ascend"),
    ({"actual_seq_qlen": [24]}, "1 sequences of queries and 2 of keys"),
    ({"actual_seq_qlen": list(range(1, 1026)), "q": bf16(1025, 8, 128)}, "1025 sequences; 1 to 1024"),
    ({"actual_seq_qlen": [16, 24]}, "sequence 0 has 16 query tokens and 8 keys"),
    ({"atten_mask": None}, "sparse_mode 3 without atten_mask"),
    ({"atten_mask": MASK[:1024, :1024]}, "takes the compressed mask"),
    ({"atten_mask": MASK.float()}, "atten_mask is float32"),
    ({"atten_mask": MASK[None]}, "atten_mask has 3 axes"),
    ({"sparse_mode": 0, "atten_mask": MASK}, "takes the whole mask, [16, 16]"),
    ({"sparse_mode": 5}, "prefix"),
    ({"sparse_mode": 6}, "prefix"),
    ({"sparse_mode": 4}, "needs pre_tockens and next_tockens"),
    ({"sparse_mode": 7}, "would show every key by default; 3 is causal"),
    ({"sparse_mode": 9}, "0 to 8"),
    ({"sparse_mode": -1}, "0 to 8"),
    ({"keep_prob": 0.0}, "keep_prob"),
]


def test_training_refuses() -> None:
    def call(given: dict) -> None:
        args, kwargs = packed_training(**given)
        check_training(*args, **kwargs)

    assert not accepted(TRAINING_REFUSED, call, "npu_fusion_attention: ")


@pytest.mark.parametrize("mode", [7, 8])
def test_modes_of_packed_layouts_are_refused_elsewhere(mode: int) -> None:
    args, kwargs = dense_training("BSND", sparse_mode=mode)
    with pytest.raises(ValueError, match="for layout TND alone"):
        check_training(*args, **kwargs)


def test_lengths_belong_to_the_packed_layout() -> None:
    args, kwargs = dense_training("BSND", actual_seq_qlen=[16, 32], actual_seq_kvlen=[16, 32])
    with pytest.raises(ValueError, match="they belong to TND"):
        check_training(*args, **kwargs)


def inference(**changes: Any) -> tuple[list, dict]:
    """Paged, packed, causal: what a rollout calls."""
    t = {"q": bf16(24, 8, 128), "k": bf16(10, 128, 256), "v": bf16(10, 128, 256), "version": 2, "input_layout": "TND", "num_heads": 8}
    t |= {"num_key_value_heads": 2, "atten_mask": MASK, "sparse_mode": 3, "actual_seq_qlen": [8, 24], "actual_seq_kvlen": [200, 16]}
    t |= {"block_table": torch.zeros(2, 5, dtype=torch.int32), "block_size": 128} | changes
    return [t.pop(name) for name in ("q", "k", "v")], t


UNPAGED = {"block_table": None, "block_size": 0, "k": bf16(24, 2, 128), "v": bf16(24, 2, 128), "actual_seq_kvlen": [8, 24]}
ONE = {"q": bf16(2, 8, 128), "actual_seq_qlen": [1, 2]}
BATCH = {"actual_seq_qlen": None, "actual_seq_kvlen": None, "block_table": None, "block_size": 0}
BSND = BATCH | {"input_layout": "BSND", "q": bf16(2, 16, 8, 128), "k": bf16(2, 16, 2, 128), "v": bf16(2, 16, 2, 128)}
BNSD = BATCH | {"input_layout": "BNSD", "q": bf16(2, 8, 16, 128), "k": bf16(2, 2, 16, 128), "v": bf16(2, 2, 16, 128)}
BSH = BATCH | {"input_layout": "BSH", "q": bf16(2, 16, 1024), "k": bf16(2, 16, 256), "v": bf16(2, 16, 256)}


@pytest.mark.parametrize(
    "given",
    [
        {},
        UNPAGED,
        {"sparse_mode": 0, "atten_mask": None},
        {"k": bf16(10, 2, 128, 128), "v": bf16(10, 2, 128, 128)},
        *({"block_size": n, "k": bf16(10, n, 256), "v": bf16(10, n, 256)} for n in (256, 384, 512)),
        ONE | {"block_size": 16, "k": bf16(20, 16, 256), "v": bf16(20, 16, 256), "block_table": torch.zeros(2, 13, dtype=torch.int32)},
        ONE | {"inner_precise": 1},
        {"inner_precise": 3},
        {"num_key_value_heads": 8, "k": bf16(10, 128, 1024), "v": bf16(10, 128, 1024)},
        BSND,
        BNSD,
        BSH,
        BNSD | {"input_layout": "BNSD_BSND"},
        BSND | {"sparse_mode": 2},
        UNPAGED | {"q": bf16(24, 8, 192), "k": bf16(24, 2, 192), "v": bf16(24, 2, 192)},
        UNPAGED | {"input_layout": "NTD_TND", "q": bf16(8, 24, 128), "k": bf16(2, 24, 128), "v": bf16(2, 24, 128)},
        UNPAGED | {"version": 1, "q": bf16(24, 8, 192), "k": bf16(24, 8, 192), "v": bf16(24, 8, 128), "num_key_value_heads": 8},
    ],
)
def test_inference_that_is_allowed(given: dict) -> None:
    args, kwargs = inference(**given)
    check_inference(*args, **kwargs)


INFERENCE_REFUSED = [
    ({"version": 3}, "version 3"),
    ({"input_layout": "SBH"}, "layout 'SBH'"),
    ({"input_layout": "XYZ"}, "layout 'XYZ'"),
    ({"q": torch.empty(24, 8, 128)}, "query is float32"),
    ({"v": torch.empty(10, 128, 256, dtype=torch.float16)}, "value is float16 and query bfloat16"),
    ({"q": bf16(24, 8, 256)[..., ::2]}, "query has strides"),
    ({"q": torch.empty(24, 8, 128, dtype=torch.float16), **{n: torch.empty(10, 128, 256, dtype=torch.float16) for n in "kv"}}, "it takes bfloat16"),
    ({"num_heads": 0}, "0 query heads"),
    ({"num_heads": 4, "num_key_value_heads": 2}, "num_heads 4, but the query has 8 heads"),
    ({"num_heads": 264, "num_key_value_heads": 2, "q": bf16(24, 264, 128)}, "264 query heads; 1 to 256"),
    ({"num_key_value_heads": 3}, "not a multiple of 3"),
    ({"num_heads": 130, "q": bf16(24, 130, 128)}, "at most 64 each"),
    ({"q": bf16(24, 8, 64), "k": bf16(10, 128, 128), "v": bf16(10, 128, 128)}, "head size 64; 128 or 192"),
    (BSND | {"q": bf16(2, 16, 8, 24), "k": bf16(2, 16, 2, 24), "v": bf16(2, 16, 2, 24)}, "head size 24; a multiple of 16"),
    (BSND | {"q": bf16(2, 16, 8, 1024), "k": bf16(2, 16, 2, 1024), "v": bf16(2, 16, 2, 1024)}, "head size 1024"),
    (
        BSND | {"num_heads": 256, "num_key_value_heads": 4, "q": bf16(1, 4, 256, 256), "k": bf16(1, 4, 4, 256), "v": bf16(1, 4, 4, 256)},
        "below 65535 together",
    ),
    (BNSD | {"input_layout": "BNSD_BSND", "q": bf16(2, 8, 1, 128)}, "more than one query token"),
    (BNSD | {"input_layout": "BNSD_NBSD"}, "is for latent attention"),
    (BSH | {"input_layout": "BSH_NBSD"}, "is for latent attention"),
    (UNPAGED | {"input_layout": "TND_NTD"}, "is for latent attention"),
    ({"input_layout": "NTD_TND", "q": bf16(8, 24, 128)}, "layout NTD_TND with pages; TND"),
    (UNPAGED | {"v": bf16(24, 2, 192)}, "heads of 128 and values of 192; 128"),
    ({"actual_seq_qlen": None}, "needs the lengths"),
    ({"actual_seq_kvlen": None}, "needs the lengths"),
    ({"actual_seq_qlen": [8, 20]}, "end at 20 of 24"),
    ({"actual_seq_qlen": [24, 8]}, "must ascend"),
    ({"actual_seq_kvlen": [200]}, "2 sequences of queries and 1 of keys"),
    ({"actual_seq_kvlen": [200, -1]}, "not below 0"),
    ({"actual_seq_kvlen": [7, 16]}, "sequence 0 has 8 query tokens and 7 keys"),
    ({"actual_seq_qlen": list(range(1, 4098)), "actual_seq_kvlen": [1] * 4097, "q": bf16(4097, 8, 128)}, "4097 sequences; 1 to 4096"),
    (UNPAGED | {"actual_seq_kvlen": [24, 8]}, "ends where there are no pages"),
    (BSND | {"actual_seq_kvlen": [1, 2, 3][:0]}, "0 entries for a batch of 2"),
    ({"block_size": 64, "k": bf16(10, 64, 256), "v": bf16(10, 64, 256)}, "pages of 64 keys; a multiple of 128 up to 512"),
    ({"block_size": 640, "k": bf16(10, 640, 256), "v": bf16(10, 640, 256)}, "pages of 640 keys"),
    ({"block_size": 0}, "pages of 0 keys"),
    (ONE | {"block_size": 24, "k": bf16(10, 24, 256), "v": bf16(10, 24, 256)}, "pages of 24 keys; a multiple of 16"),
    ({"block_size": 256}, "[pages, 256, 256] is expected"),
    ({"block_table": torch.zeros(2, 5, dtype=torch.int64)}, "block_table is int64"),
    ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, "3 rows for 2 sequences"),
    ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "1 columns; 2 pages of 128 are needed for the longest"),
    ({"block_table": torch.zeros(10, dtype=torch.int32)}, "block_table has 1 axes"),
    ({"v": bf16(10, 128, 512)}, "differ"),
    ({"k": bf16(1, 128, 256), "v": bf16(1, 128, 256), "shared_pages": True}, "1 pages of 128; 2 are needed for the longest sequence"),
    ({"k": bf16(2, 128, 256), "v": bf16(2, 128, 256)}, "2 pages of 128; 3 are needed for all sequences together"),
    (
        {"num_heads": 256, "num_key_value_heads": 256, "q": bf16(24, 256, 512), "k": bf16(4, 128, 131072), "v": bf16(4, 128, 131072)},
        "head size 512; 128 or 192",
    ),
    (UNPAGED | {"block_size": 128}, "block_size 128 without block_table"),
    ({"sparse_mode": 3, "atten_mask": None}, "without atten_mask"),
    ({"sparse_mode": 0}, "0 without, or 3 (causal) with"),
    ({"sparse_mode": 2}, "0 without, or 3 (causal) with"),
    ({"sparse_mode": 5}, "0 to 4"),
    ({"sparse_mode": 9}, "0 to 4"),
    ({"atten_mask": MASK[:1024, :1024].contiguous()}, "takes the compressed mask"),
    ({"atten_mask": MASK.float()}, "atten_mask is float32"),
    ({"atten_mask": MASK.t()}, "must be contiguous"),
    ({"inner_precise": 4}, "inner_precise 4"),
    (ONE | {"inner_precise": 2}, "0 to 1 for one query token"),
    ({"version": 1}, "with pages; the documents allow them in version 2"),
    (UNPAGED | {"version": 1}, "head size 128; 192"),
    (UNPAGED | {"version": 1, "q": bf16(24, 8, 192), "k": bf16(24, 2, 192), "v": bf16(24, 2, 192)}, "8 query heads and 2 key/value heads"),
    (UNPAGED | {"actual_seq_kvlen": [84, 104]}, "lengths of keys end at 104 of 24 keys"),
    (UNPAGED | {"v": bf16(24, 2, 64)}, "values of 64; 128"),
    (UNPAGED | {"k": bf16(24, 4, 128), "v": bf16(24, 4, 128)}, "2 heads of 128 are expected"),
    (UNPAGED | {"v": bf16(20, 2, 128)}, "differ"),
    (
        UNPAGED | {"version": 1, "q": bf16(24, 7, 192), "k": bf16(24, 7, 192), "num_heads": 7, "num_key_value_heads": 7, "v": bf16(24, 7, 128)},
        "7 heads; 8, 16",
    ),
    (BNSD | {"actual_seq_kvlen": [99, 99]}, "from 0 to the 16 tokens that are there"),
    (BNSD | {"actual_seq_qlen": [99, 99]}, "from 0 to the 16 tokens that are there"),
    (BNSD | {"sparse_mode": 0, "atten_mask": torch.ones(3, 5, dtype=torch.bool)}, "takes the whole mask, [16, 16]"),
    (BNSD | {"sparse_mode": 1, "atten_mask": torch.ones(2, 1, 16, 5, dtype=torch.bool)}, "takes the whole mask, [16, 16]"),
    (BNSD | {"k": bf16(2, 2, 8, 128), "v": bf16(2, 2, 8, 128)}, "16 query tokens and 8 keys: sparse_mode 3 would leave rows without a key"),
    (BNSD | {"v": bf16(2, 2, 16, 1000)}, "differ; their shapes must be the same"),
    (BNSD | {"k": bf16(3, 2, 16, 128), "v": bf16(3, 2, 16, 128)}, "the batches differ"),
    (BNSD | {"k": bf16(2, 16, 128), "v": bf16(2, 16, 128)}, "key [2, 16, 128] with layout BNSD"),
    (BSH | {"k": bf16(2, 16, 200), "v": bf16(2, 16, 200)}, "[2, S, 256] is expected"),
    (BSH | {"q": bf16(2, 16, 1030)}, "1030 columns of the query do not divide by 8 heads"),
    (BSND | {"q": bf16(0, 16, 8, 128), "k": bf16(0, 16, 2, 128), "v": bf16(0, 16, 2, 128)}, "batch 0; 1 to 65536"),
    ({"k": bf16(10, 3, 128, 128), "v": bf16(10, 3, 128, 128)}, "[pages, 2, 128, 128] is expected"),
    ({"k": bf16(1 << 17, 128, 256), "v": bf16(1 << 17, 128, 256)}, "elements of one cache"),
]


def test_inference_refuses() -> None:
    def call(given: dict) -> None:
        args, kwargs = inference(**given)
        check_inference(*args, **kwargs)

    assert not accepted(INFERENCE_REFUSED, call, "npu_fused_infer_attention_score")


def product(**changes: Any) -> dict:
    return {"x": bf16(24, 64), "weight": [bf16(8, 64, 96)], "group_list": torch.empty(8, dtype=torch.int64, device="meta")} | changes


FP32 = {"x": torch.empty(24, 64, device="meta"), "weight": [torch.empty(8, 64, 96, device="meta")]}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"weight": [bf16(96, 64).t() for _ in range(8)]},
        {"weight": [bf16(70000, 64).t() for _ in range(8)]},
        {"group_list_type": 1},
        {"split_item": 3},
        FP32,
        {"weight": [bf16(1, 96, 64).transpose(1, 2)], "group_list": torch.empty(1, dtype=torch.int64, device="meta")},
    ],
)
def test_products_that_are_allowed(given: dict) -> None:
    limits.check_grouped(**product(**given))


PRODUCTS_REFUSED = [
    ({"x": torch.empty(24, 64, dtype=torch.int8)}, "x is int8"),
    ({"x": bf16(64, 24).t()}, "x has strides"),
    ({"x": bf16(24, 32)}, "x has 32 columns"),
    ({"weight": [torch.empty(8, 64, 96)]}, "weight is float32 and x bfloat16"),
    ({"weight": []}, "0 weights"),
    ({"weight": [bf16(64, 96)] * 129}, "129 weights; 1 to 128"),
    ({"weight": [bf16(64, 96), bf16(96, 64).t()]}, "must be alike"),
    ({"weight": [bf16(8, 64, 70000)]}, "below 65536"),
    (FP32 | {"weight": [torch.empty(64, 96, device="meta")] * 8}, "float32 with 8 weights"),
    ({"weight": [bf16(64, 96)], "group_list": torch.empty(1, dtype=torch.int64, device="meta")}, "weight has 2 axes; it takes 3"),
    ({"weight": [bf16(64, 192)[:, :96]] * 8}, "it must be contiguous, or its transpose must be"),
    ({"group_list": torch.empty(8, dtype=torch.int32, device="meta")}, "group_list is int32"),
    ({"group_list": torch.empty(7, dtype=torch.int64, device="meta")}, "7 entries for 8 experts"),
    ({"split_item": 0}, "split_item 0"),
    ({"group_type": -1}, "group_type -1"),
    ({"group_type": 2}, "group_type 2"),
    ({"group_list_type": 2}, "group_list_type 2"),
    ({"weight": [bf16(1, 64, 96)], "group_list": torch.empty(1, dtype=torch.int64, device="meta"), "group_list_type": 1}, "with one expert"),
    ({"weight": [bf16(1025, 64, 96)], "group_list": torch.empty(1025, dtype=torch.int64, device="meta")}, "1025 experts; at most 1024"),
    ({"output_dtype": torch.float32}, "it gives the type of x"),
]


def test_products_refuse() -> None:
    assert not accepted(PRODUCTS_REFUSED, lambda given: limits.check_grouped(**product(**given)), "npu_grouped_matmul: ")


INDEX = torch.empty(24, 2, dtype=torch.int64, device="meta")


MOVES_AND_NORMS_REFUSED = [
    (lambda: limits.check_permute(torch.empty(24, 8), INDEX), "tokens is float32"),
    (lambda: limits.check_permute(bf16(24, 8), INDEX.int()), "indices is int32"),
    (lambda: limits.check_permute(bf16(23, 8), INDEX), "24 rows for 23 tokens"),
    (lambda: limits.check_permute(bf16(24, 8), torch.empty(24, 513, dtype=torch.int64, device="meta")), "513 choices"),
    (lambda: limits.check_permute(bf16(1 << 22, 8), torch.empty(1 << 22, 8, dtype=torch.int64, device="meta")), "below 16777215"),
    (lambda: limits.check_permute(bf16(24, 8), INDEX, padded_mode=True), "padded_mode"),
    (lambda: limits.check_unpermute(bf16(48, 8), INDEX.flatten()[:47].int()), "47 indices for 48 rows"),
    (lambda: limits.check_unpermute(bf16(48, 8), INDEX.int()), "sorted_indices has 2 axes"),
    (lambda: limits.check_unpermute(bf16(48, 8), INDEX.flatten()), "sorted_indices is int64; it takes int32"),
    (lambda: limits.check_unpermute(bf16(48, 8), INDEX.flatten().int(), probs=bf16(24, 2)), "not in the tree of experts"),
    (lambda: limits.check_rms_norm(bf16(8), bf16(8), 1e-6), "x has 1 axes"),
    (lambda: limits.check_rms_norm(bf16(4, 8), torch.empty(8), 1e-6), "gamma is float32 and x bfloat16"),
    (lambda: limits.check_rms_norm(bf16(4, 8), bf16(4), 1e-6), "gamma has 4 entries"),
    (lambda: limits.check_rms_norm(bf16(0, 8), bf16(8), 1e-6), "is empty"),
    (lambda: limits.check_rms_norm(bf16(4, 8), bf16(8), -1.0), "at least 0"),
]


def test_moves_and_norms_refuse() -> None:
    assert not accepted(MOVES_AND_NORMS_REFUSED, lambda call: call(), "")


def pages(**changes: Any) -> dict:
    t = {"k": bf16(6, 2, 128), "v": bf16(6, 2, 128), "key_cache": bf16(4, 128, 2, 128), "value_cache": bf16(4, 128, 2, 128)}
    return t | {"slots": torch.empty(6, dtype=torch.int64, device="meta")} | changes


PAGE_WRITES_REFUSED = [
    ({"cache_mode": "PA_NZ"}, "fractal pages need a conversion"),
    ({"k": bf16(6, 2, 256)[..., ::2]}, "key has strides"),
    ({"v": bf16(5, 2, 128)}, "tokens and heads must be the same"),
    ({"v": torch.empty(6, 2, 128)}, "value is float32"),
    ({"key_cache": bf16(4, 2, 128, 128), "value_cache": bf16(4, 2, 128, 128)}, "[pages, page, heads, size] is expected"),
    ({"value_cache": bf16(5, 128, 2, 128)}, "pages and their size, the first two axes, must be the same"),
    ({"value_cache": bf16(4, 64, 2, 128)}, "pages and their size, the first two axes, must be the same"),
    ({"key_cache": bf16(4, 128, 256)}, "key_cache has 3 axes"),
    ({"slots": torch.empty(5, dtype=torch.int64, device="meta")}, "5 slots for 6 tokens"),
    ({"slots": torch.empty(6, dtype=torch.int16, device="meta")}, "slot_mapping is int16"),
    ({"slots": torch.empty(12, dtype=torch.int64, device="meta")[::2]}, "slot_mapping has strides [2]"),
]


def test_page_writes_refuse() -> None:
    limits.check_page_write(**pages())
    assert not accepted(PAGE_WRITES_REFUSED, lambda given: limits.check_page_write(**pages(**given)), "npu_scatter_pa_kv_cache")


def test_lengths_on_a_device_are_refused_and_host_lengths_read_once() -> None:
    with pytest.raises(ValueError, match="every layer would wait for the device.*query_start_loc_cpu"):
        numbers("attention", "cu_q", torch.empty(3, dtype=torch.int32, device="meta"))
    cu = torch.tensor([0, 5, 9], dtype=torch.int32)
    assert starts("attention", "cu_q", cu, 9).ends == (5, 9)
    assert numbers("attention", "cu_q", cu) is numbers("attention", "cu_q", cu)
    cu[1] = 4
    assert numbers("attention", "cu_q", cu) == (0, 4, 9)
    assert on_device(cu, torch.device("meta")) is on_device(cu, torch.device("meta"))
    with torch.inference_mode():
        inside = torch.tensor([0, 2], dtype=torch.int32)
        assert numbers("attention", "cu_q", inside) == (0, 2)
        inside[1] = 1
        assert numbers("attention", "cu_q", inside) == (0, 1)
    for wrong in ([1, 9], [0, 8], [0, 9, 5]):
        with pytest.raises(ValueError, match="must ascend from 0 to the 9 tokens"):
            starts("attention", "cu_q", torch.tensor(wrong, dtype=torch.int32), 9)

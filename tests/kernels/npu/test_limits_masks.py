"""Masks, sparse modes and lengths of ``npu_fused_infer_attention_score``: every shape that the documents list is taken, and no other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tio_megatron.kernels.npu.limits_inference import check_inference
from tio_megatron.kernels.npu.limits_masks import check_whole

B, H, G, D = 2, 8, 2, 128
COLUMNS, PAGE = 5, 128


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def mask(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bool, device="meta")


def shaped(layout: str, batch: int, tokens: int, heads: int, size: int = D) -> torch.Tensor:
    return bf16(*{"BSH": (batch, tokens, heads * size), "BSND": (batch, tokens, heads, size), "BNSD": (batch, heads, tokens, size)}[layout])


def whole(layout: str = "BNSD", queries: int = 16, keys: int = 16, **given: Any) -> None:
    """One call without pages."""
    k = shaped(layout, B, keys, G)
    kwargs: dict[str, Any] = {"version": 2, "num_heads": H, "num_key_value_heads": G, "input_layout": layout, "v": k} | given
    check_inference(shaped(layout, B, queries, H), k, **kwargs)


def paged(layout: str = "BNSD", queries: int = 16, **given: Any) -> None:
    """One call over pages: sequences of 100 and 300 keys, so three pages for the longest, and five columns."""
    table = torch.empty(B, COLUMNS, dtype=torch.int32, device="meta")
    kwargs: dict[str, Any] = {"version": 2, "num_heads": H, "num_key_value_heads": G, "input_layout": layout, "block_table": table, "block_size": PAGE}
    pages = bf16(10, PAGE, G * D)
    check_inference(shaped(layout, B, queries, H), pages, pages, **(kwargs | {"actual_seq_kvlen": [100, 300]} | given))


LAYOUTS = pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])


@LAYOUTS
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("version", [1, 2])
def test_whole_masks_that_are_listed(layout: str, mode: int, version: int) -> None:
    for queries, keys in ((16, 16), (5, 20), (33, 70)):
        for q, k in itertools.product({queries, -(-queries // 16) * 16, -(-queries // 32) * 32}, {keys, -(-keys // 16) * 16, -(-keys // 32) * 32}):
            for shape in ((q, k), (1, q, k), (B, 1, q, k), (1, 1, q, k)):
                whole(layout, queries, keys, sparse_mode=mode, atten_mask=mask(*shape), version=version)
    for shape in ((B, 20), (1, 1, 20), (B, 1, 1, 20), (1, 1, 1, 20)):
        whole(layout, 1, 20, sparse_mode=mode, atten_mask=mask(*shape), version=version)


@LAYOUTS
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", [(B, 16, 20), (B, H, 16, 20), (1, H, 16, 20), (17, 20), (16, 21), (16, 19), (B, 20), (3, 5), (7, 7, 7, 7), (16, 1, 20)])
def test_other_whole_masks_are_refused(layout: str, mode: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sparse_mode . takes the whole mask, \[16, 20\] or \[1, 16, 20\] or \[2, 1, 16, 20\]") as caught:
        whole(layout, 16, 20, sparse_mode=mode, atten_mask=mask(*shape))
    assert str(list(shape)) in str(caught.value) and "\n" not in str(caught.value)


@LAYOUTS
@pytest.mark.parametrize("shape", [(1, 20), (3, 20), (B, 1, 20), (B, H, 1, 20), (B, 19), (16, 20)])
def test_other_masks_of_one_query_token_are_refused(layout: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes the whole mask, \[2, 20\] or \[1, 1, 20\]"):
        whole(layout, 1, 20, sparse_mode=0, atten_mask=mask(*shape))


@LAYOUTS
@pytest.mark.parametrize("mode", [0, 1])
def test_over_pages_the_whole_mask_reaches_over_the_pages(layout: str, mode: int) -> None:
    for keys in (3 * PAGE, COLUMNS * PAGE):
        for shape in ((16, keys), (1, 16, keys), (B, 1, 16, keys)):
            paged(layout, sparse_mode=mode, atten_mask=mask(*shape))
    for shape in ((16, 300), (3, 5), (7, 7, 7, 7), (B, 16, COLUMNS * PAGE), (B, H, 16, COLUMNS * PAGE), (17, COLUMNS * PAGE)):
        with pytest.raises(ValueError, match=r"takes the whole mask, \[16, 384\].*\(or 384 and more\)"):
            paged(layout, sparse_mode=mode, atten_mask=mask(*shape))


def test_version_1_wants_the_mask_of_one_query_token_over_all_columns() -> None:
    paged(queries=1, sparse_mode=0, atten_mask=mask(B, COLUMNS * PAGE), version=1)
    paged(queries=1, sparse_mode=0, atten_mask=mask(B, 3 * PAGE), version=2)
    with pytest.raises(ValueError, match=r"takes the whole mask, \[2, 640\]"):
        paged(queries=1, sparse_mode=0, atten_mask=mask(B, 3 * PAGE), version=1)


@pytest.mark.parametrize("call", [whole, paged])
@pytest.mark.parametrize("mode", [2, 3])
def test_compressed_masks(call, mode: int) -> None:  # type: ignore[no-untyped-def]
    for good in ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)):
        call(sparse_mode=mode, atten_mask=mask(*good))
    for wrong in ((2048, 1, 2048), (2048, 2048, 1), (1, 2048, 1, 2048), (2, 2048, 2048), (16, 16), (1024, 2048)):
        with pytest.raises(ValueError, match=r"takes the compressed mask \[2048, 2048\] or \[1, 2048, 2048\]"):
            call(sparse_mode=mode, atten_mask=mask(*wrong))


@pytest.mark.parametrize("call", [whole, paged])
def test_a_band_is_refused_while_its_window_is_not_passed(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="sparse_mode 4 .* would show every key by default; 3 is causal"):
        call(sparse_mode=4, atten_mask=mask(2048, 2048))


CAUSAL: dict[str, Any] = {"sparse_mode": 3, "atten_mask": mask(2048, 2048)}


@LAYOUTS
@pytest.mark.parametrize("call", [whole, paged])
def test_causal_calls_want_a_key_for_every_row_of_each_sequence(call, layout: str) -> None:  # type: ignore[no-untyped-def]
    call(layout, actual_seq_kvlen=[16, 16], **CAUSAL)
    call(layout, actual_seq_kvlen=[8, 8], actual_seq_qlen=[8, 3], **CAUSAL)
    call(layout, actual_seq_kvlen=[8], actual_seq_qlen=[8], **CAUSAL)
    call(layout, actual_seq_kvlen=[16, 16, 3], **CAUSAL)  # the third entry of a batch of two is not looked at
    for keys, queries, which in (([16, 8], None, 1), ([8], None, 0), ([8, 9], [8, 10], 1)):
        with pytest.raises(ValueError, match=f"sequence {which} has .* query tokens and .* keys: sparse_mode 3 would leave rows without a key"):
            call(layout, actual_seq_kvlen=keys, actual_seq_qlen=queries, **CAUSAL)


@LAYOUTS
def test_values_are_shaped_as_keys(layout: str) -> None:
    for wrong in (shaped(layout, B, 16, G, 64), shaped(layout, B, 16, G, 160), shaped(layout, B, 15, G), shaped(layout, B, 16, 1)):
        with pytest.raises(ValueError, match="their shapes must be the same"):
            whole(layout, v=wrong)


def test_lengths_of_sequences() -> None:
    longest = 20 * (1 << 20)
    whole(queries=1, keys=262144)
    whole(queries=2, keys=262145)
    whole(queries=longest, keys=longest)
    with pytest.raises(ValueError, match="262145 keys of a sequence for one query token; at most 262144"):
        whole(queries=1, keys=262145)
    with pytest.raises(ValueError, match=f"{longest + 1} query tokens of a sequence; at most {longest}"):
        whole(queries=longest + 1, keys=longest)
    with pytest.raises(ValueError, match=f"{longest + 1} keys of a sequence for several query tokens; at most {longest}"):
        whole(queries=2, keys=longest + 1)


@pytest.mark.parametrize(("version", "most", "size", "groups"), [(1, 65536, 192, H), (2, 1 << 20, 128, G)])
def test_keys_of_a_packed_call(version: int, most: int, size: int, groups: int) -> None:
    def packed(keys: int) -> None:
        k = bf16(keys, groups, size)
        lengths: dict[str, Any] = {"actual_seq_qlen": [8, 24], "actual_seq_kvlen": [8, keys], "num_key_value_heads": groups}
        check_inference(bf16(24, H, size), k, k, version=version, input_layout="TND", num_heads=H, **CAUSAL, **lengths)

    packed(most)
    with pytest.raises(ValueError, match=f"{most + 1} keys in a packed layout; at most {most}"):
        packed(most + 1)


@LAYOUTS
def test_the_cache_holds_the_pages_of_all_sequences_unless_they_share(layout: str) -> None:
    pages = bf16(3, PAGE, G * D)
    table = torch.empty(B, COLUMNS, dtype=torch.int32, device="meta")

    def call(**given: Any) -> None:
        more: dict[str, Any] = {"block_table": table, "block_size": PAGE, "actual_seq_kvlen": [300]} | given
        check_inference(shaped(layout, B, 16, H), pages, pages, version=2, input_layout=layout, num_heads=H, num_key_value_heads=G, **more)

    call(shared_pages=True)
    call(actual_seq_kvlen=[100, 200])
    with pytest.raises(ValueError, match="3 pages of 128; 6 are needed for all sequences together"):
        call()


def test_rounding_is_of_the_tokens_not_of_the_form() -> None:
    with pytest.raises(ValueError, match="takes the whole mask"):
        check_whole("fia", mask(32, 20), 0, 3, 1, 20, at_least=False)

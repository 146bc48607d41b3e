"""The family's attention is one definition: whole = packed = paged, prefill = chunks = decode, in every byte, over a table of chosen cases.

This is about the CPU twin, which is the family's definition. Whether a device does the same is asked by ``ascend_selfcheck``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tio_megatron.kernels.npu.calls import find
from tio_megatron.kernels.npu.masks import CAUSAL
from tio_megatron.kernels.npu.twin_attention import FAMILY, Order, attend, tree
from tio_megatron.testing import assert_same_bytes

SIZE = 16
SCALE = SIZE**-0.5


@dataclass(frozen=True)
class Case:
    """Sequences in one call. ``cuts``: where a sequence is cut into calls; ``page`` 0: keys are not in pages."""

    lengths: tuple[int, ...]
    heads: int = 4
    groups: int = 2
    page: int = 0
    cuts: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = ["+".join(map(str, self.lengths)), f"H{self.heads}G{self.groups}"]
        words += [f"page{self.page}"] if self.page else []
        words += ["cut" + ",".join(map(str, self.cuts))] if self.cuts else []
        return "-".join(words)


AROUND = (1, 2, 127, 511, 512, 513, 640, 1023, 1024, 1025, 1537)
WHOLE = [Case((n,)) for n in AROUND] + [Case((n,), 4, 4) for n in (512, 513, 1025)] + [Case((n,), 8, 1) for n in (511, 1024, 1025)]
PACKED = [Case(c) for c in ((1, 1), (512, 1), (1, 512), (511, 513), (300, 700, 1), (513, 513), (1024, 5), (37, 1025, 37))] + [Case((513, 640), 8, 1)]
PAGED = [Case((n,), page=page) for page in (128, 256, 512) for n in (1, 127, 512, 513, 1024, 1025)]
PAGED += [Case(c, page=page) for page in (128, 512) for c in ((511, 513), (1, 1025, 300))] + [Case((1025,), 8, 1, 256)]
CHUNKS = [
    Case((n,), page=page, cuts=cuts) for page in (0, 128, 512) for n, cuts in ((1025, (512,)), (1025, (511, 513)), (1024, (300, 700)), (640, (1, 2, 3, 600)))
]
CHUNKS += [Case((1537,), page=256, cuts=(100, 1100, 1500)), Case((513,), 8, 1, 128, (256, 512))]
DECODED = (0, 1, 127, 128, 510, 511, 512, 513, 700, 1022, 1023, 1024, 1100)
DECODE = [Case((n,), page=page) for page in (0, 128, 256, 512) for n in (513, 1025)] + [Case((1101,), 8, 1, 128), Case((1101,), 4, 4, 512)]


def test_the_table_is_large_enough_and_the_page_counts_it() -> None:
    cases = len(WHOLE + PACKED + PAGED + CHUNKS + DECODE)
    assert cases >= 60 and f"in every byte, in {cases} cases, with planted orders" in (Path(__file__).parents[3] / "docs" / "ascend.md").read_text()


@cache
def sequence(length: int, heads: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of one sequence and its result, by the training operator alone. Large scores, so that the order shows."""
    g = torch.Generator().manual_seed(1000 * length + heads)
    q, k, v = (torch.randn(length, n, SIZE, generator=g).mul(2).bfloat16() for n in (heads, groups, groups))
    return q, k, v, train(q, k, v, (length,))


def train(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    ends = ends_of(lengths)
    return find("npu_fusion_attention")(
        q, k, v, q.shape[1], "TND", scale=SCALE, actual_seq_qlen=ends, actual_seq_kvlen=ends, sparse_mode=CAUSAL, softmax_layout="TND"
    )[0]


def ends_of(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[: i + 1]) for i in range(len(lengths))]


def infer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: list[int], keys: list[int], page: int) -> torch.Tensor:
    """The inference operator; ``keys`` of each sequence lie end to end in ``k`` and ``v``, and are put into shuffled pages where ``page`` is not 0."""
    given: dict = {"actual_seq_qlen": ends_of(tuple(queries)), "actual_seq_kvlen": ends_of(tuple(keys))}
    if page:
        counts = [-(-n // page) for n in keys]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
        table = torch.full((len(keys), max(counts)), sum(counts) - 1, dtype=torch.int32)
        pools = [torch.full((sum(counts), page, k.shape[1] * SIZE), float("nan")).bfloat16() for _ in range(2)]
        start = 0
        for i, n in enumerate(keys):
            for j in range(counts[i]):
                here = order.pop()
                table[i, j] = here
                stop = min((j + 1) * page, n)
                for pool, rows in zip(pools, (k, v), strict=True):
                    pool[here, : stop - j * page] = rows[start + j * page : start + stop].flatten(1)
            start += n
        k, v = pools
        given |= {"block_table": table, "block_size": page, "actual_seq_kvlen": keys}
    groups = k.shape[1] if not page else k.shape[2] // SIZE
    return find("npu_fused_infer_attention_score_v2")(
        q, k, v, num_query_heads=q.shape[1], num_key_value_heads=groups, softmax_scale=SCALE, input_layout="TND", sparse_mode=CAUSAL, **given
    )[0]


def joined(case: Case) -> list[torch.Tensor]:
    """q, k, v and the result of the case's sequences, end to end."""
    return [torch.cat(parts) for parts in zip(*(sequence(n, case.heads, case.groups) for n in case.lengths), strict=True)]


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_inference_gives_what_training_gives(case: Case) -> None:
    q, k, v, want = joined(case)
    assert_same_bytes(infer(q, k, v, list(case.lengths), list(case.lengths), 0), want, str(case))


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_a_pack_gives_each_sequence_what_it_has_alone(case: Case) -> None:
    q, k, v, want = joined(case)
    assert_same_bytes(train(q, k, v, case.lengths), want, f"training {case}")
    assert_same_bytes(infer(q, k, v, list(case.lengths), list(case.lengths), 128), want, f"inference {case}")


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_pages_do_not_show(case: Case) -> None:
    q, k, v, want = joined(case)
    assert_same_bytes(infer(q, k, v, list(case.lengths), list(case.lengths), case.page), want, str(case))


@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_chunks_give_the_rows_of_the_whole(case: Case) -> None:
    (length,) = case.lengths
    q, k, v, want = sequence(length, case.heads, case.groups)
    for a, b in pairwise((0, *case.cuts, length)):
        assert_same_bytes(infer(q[a:b], k[:b], v[:b], [b - a], [b], case.page), want[a:b], f"{case} rows {a}:{b}")


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_decoding_gives_the_rows_of_the_whole(case: Case) -> None:
    """Thirteen tokens at once, each of a sequence of its own."""
    (length,) = case.lengths
    q, k, v, want = sequence(length, case.heads, case.groups)
    at = [i for i in DECODED if i < length]
    keys, values = (torch.cat([t[: i + 1] for i in at]) for t in (k, v))
    assert_same_bytes(infer(q[at], keys, values, [1] * len(at), [i + 1 for i in at], case.page), want[at], str(case))


def test_prefill_chunk_and_decode_in_one_call() -> None:
    q, k, v, want = sequence(1025, 4, 2)
    rows = [slice(0, 513), slice(513, 1000), slice(1024, 1025)]
    keys = [513, 1000, 1025]
    out = infer(torch.cat([q[r] for r in rows]), *(torch.cat([t[:n] for n in keys]) for t in (k, v)), [r.stop - r.start for r in rows], keys, 256)
    assert_same_bytes(out, torch.cat([want[r] for r in rows]), "prefill, chunk and decode together")


def test_a_key_that_is_not_seen_is_not_read() -> None:
    q, k, v, want = sequence(640, 4, 2)
    k, v = k.clone(), v.clone()
    k[600:], v[600:] = float("nan"), float("nan")
    o = attend(q[:640], k, v, SCALE)[0]
    assert_same_bytes(o[:600], want[:600], "rows before NaN keys")
    assert o[600:].isnan().all()


# Negative controls: other orders, which the table above would catch.


@pytest.mark.parametrize(
    "wrong",
    [Order(splits=2), Order(grid=1000), Order(block=64), Order(block=1024)],
    ids=["keys-split", "grid-from-chunk", "blocks-of-64", "blocks-of-1024"],
)
def test_another_order_gives_other_bytes(wrong: Order) -> None:
    q, k, v, want = sequence(1025, 4, 2)
    rows, stop = slice(1000, 1025), 1025
    assert_same_bytes(attend(q[rows], k[:stop], v[:stop], SCALE, order=FAMILY)[0], want[rows], "the family's order")
    with pytest.raises(AssertionError):
        assert_same_bytes(attend(q[rows], k[:stop], v[:stop], SCALE, order=wrong)[0], want[rows], "another order")


@pytest.mark.parametrize("narrow", [False, True])
def test_a_sum_over_the_width_of_the_call_makes_decode_differ_from_prefill(narrow: bool) -> None:
    """What open kernels do in a block that is not full: found by reading, planted here, and the first thing to ask of a device.

    The fp32 sum differs; one rounding to bf16 hides most of it, so the sums are compared.
    """
    q, k, v, _ = sequence(1025, 4, 2)
    order = Order(narrow=narrow)
    whole = attend(q, k, v, SCALE, order=order)[2][700:760]
    alone = torch.cat([attend(q[i : i + 1], k[: i + 1], v[: i + 1], SCALE, order=order)[2] for i in range(700, 760)])
    if not narrow:
        assert_same_bytes(alone, whole, "decode against prefill")
        return
    with pytest.raises(AssertionError):
        assert_same_bytes(alone, whole, "decode against prefill")


def test_masked_keys_that_take_part_let_nan_through() -> None:
    q, k, v, want = sequence(640, 4, 2)
    v = v.clone()
    v[600:] = float("nan")
    visited = attend(q, k, v, SCALE, order=Order(visit_masked=True))[0]
    assert visited[512:600].isnan().any() and not attend(q, k, v, SCALE)[0][512:600].isnan().any()


def test_the_tree_is_the_contracts() -> None:
    from tio_megatron.kernels.exact import tree_sum

    p = torch.rand(3, 512)
    assert_same_bytes(tree(p, 512), tree_sum(p.t().contiguous()), "tree over a block")
    assert_same_bytes(tree(p[:, :300], 512), tree_sum(torch.cat([p[:, :300], torch.zeros(3, 212)], 1).t().contiguous()), "absent places")

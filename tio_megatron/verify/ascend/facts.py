"""Questions to one device: does attention give the same bytes in training, prefill, chunks and decode; does a row see its neighbours; and so on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tio_megatron.kernels.attention import npu as attention
from tio_megatron.kernels.grouped import npu as grouped
from tio_megatron.kernels.norm import npu as norm
from tio_megatron.kernels.npu import permute, twin
from tio_megatron.kernels.npu.calls import find
from tio_megatron.kernels.npu.masks import CAUSAL, causal
from tio_megatron.kernels.npu.twin_attention import Order, attend
from tio_megatron.verify.ascend.answers import Answer, ask, same
from tio_megatron.verify.ascend.place import Place

HEADS, GROUPS, SIZE = 4, 2, 128
SCALE = SIZE**-0.5
PAGES = (128, 256, 512)


class Attention:
    """Sequences of one place and their results by the training operator, one at a time."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.whole: dict[int, torch.Tensor] = {}

    def qkv(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (self.place.random(length, n, SIZE, seed=length * 3 + i, scale=2.0) for i, n in enumerate((HEADS, GROUPS, GROUPS)))
        return q, k, v

    def train(self, lengths: list[int]) -> torch.Tensor:
        q, k, v = (torch.cat(t) for t in zip(*(self.qkv(n) for n in lengths), strict=True))
        starts = cumulative(lengths)
        return attention.attention(q, k, v, starts, starts, SCALE)[0]

    def want(self, length: int) -> torch.Tensor:
        if length not in self.whole:
            self.whole[length] = self.train([length])
        return self.whole[length]

    def paged(self, length: int, rows: list[tuple[int, int]], page: int) -> torch.Tensor:
        """Query rows ``a:b`` as calls of their own over pages that hold the first ``b`` keys; all calls in one batch."""
        q, k, v = self.qkv(length)
        counts = [-(-b // page) for _, b in rows]
        cache = torch.full((sum(counts), GROUPS, page, 2 * SIZE), float("nan"), dtype=torch.bfloat16, device=self.place.device)
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5))
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        slots, keys, start = [], [], 0
        for i, (_, b) in enumerate(rows):
            mine = order[start : start + counts[i]]
            start += counts[i]
            table[i, : counts[i]] = mine
            slots.append((mine[:, None] * page + torch.arange(page)).reshape(-1)[:b])
            keys.append((k[:b], v[:b]))
        attention.write_pages(torch.cat([a for a, _ in keys]), torch.cat([b for _, b in keys]), cache, torch.cat(slots).to(self.place.device))
        taken = torch.cat([q[a:b] for a, b in rows])
        out = torch.empty_like(taken)
        seq_lens = torch.tensor([b for _, b in rows], dtype=torch.int32)
        attention.attention_paged(taken, cache, table.to(self.place.device), seq_lens, cumulative([b - a for a, b in rows]), SCALE, out)
        return out


def cumulative(lengths: list[int]) -> torch.Tensor:
    """int32 starts on the host."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def operators(place: Place) -> Iterator[Answer]:
    """All questions to one device, the most important first."""
    yield from _attention(place, Attention(place))
    yield from _rows(place)


def _attention(place: Place, asked: Attention) -> Iterator[Answer]:
    def dense() -> None:
        for n in place.lengths:
            starts = cumulative([n])
            same(attention.attention_dense(*asked.qkv(n), starts, starts, SCALE)[0], asked.want(n), f"{n} tokens")

    def prefill() -> None:
        for page in PAGES:
            for n in place.lengths:
                same(asked.paged(n, [(0, n)], page), asked.want(n), f"{n} tokens, pages of {page}")

    def decode() -> None:
        n = max(place.lengths)
        at = sorted({0, 1, n // 3, n // 2, n - 2, n - 1, *(i for i in (127, 128, 511, 512, 513, 700, 1023, 1024) if i < n)})
        for page in PAGES:
            same(asked.paged(n, [(i, i + 1) for i in at], page), asked.want(n)[at], f"one token at a time of {n}, pages of {page}")

    def chunks() -> None:
        n = max(place.lengths)
        cuts = sorted({0, min(100, n // 4), n // 2, min(513, n - 1), n - 3, n})
        for page in PAGES:
            rows = [(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
            same(asked.paged(n, rows, page), asked.want(n), f"chunks at {cuts} of {n}, pages of {page}")

    def packs() -> None:
        lengths = [n for n in place.lengths if n < 2000]
        same(asked.train(lengths), torch.cat([asked.want(n) for n in lengths]), f"a pack of {lengths}")

    def behind_the_mask() -> None:
        n = max(n for n in place.lengths if n < 2000)
        q, k, v = asked.qkv(n)
        k, v = k.clone(), v.clone()
        k[n - 5 :], v[n - 5 :] = float("nan"), float("nan")
        starts = cumulative([n])
        same(attention.attention(q, k, v, starts, starts, SCALE)[0][: n - 5], asked.want(n)[: n - 5], "rows before keys that are NaN")

    def like_the_twin() -> str:
        n = max(n for n in place.lengths if n < 700)
        q, k, v = (t.cpu() for t in asked.qkv(n))
        got = asked.want(n).cpu()
        names = {"the family's": Order(), "sums by width": Order(narrow=True), "blocks of 128": Order(block=128), "blocks of 1024": Order(block=1024)}
        differ = {name: int((attend(q, k, v, SCALE, order=order)[0].view(torch.int16) != got.view(torch.int16)).sum()) for name, order in names.items()}
        told = ", ".join(f"{name} {count}" for name, count in differ.items()) + f" of {got.numel()} elements differ"
        if differ["the family's"]:
            raise ValueError(told)
        return told

    def gradient() -> None:
        n = max(n for n in place.lengths if n < 2000)
        q, k, v = asked.qkv(n)
        starts = cumulative([n])
        o, lse = attention.attention(q, k, v, starts, starts, SCALE)
        first = attention.attention_backward(o, q, k, v, o, lse, starts, starts, SCALE)
        for i in range(place.repeats):
            for name, a, b in zip(("dq", "dk", "dv"), first, attention.attention_backward(o, q, k, v, o, lse, starts, starts, SCALE), strict=True):
                same(b, a, f"{name} of run {i + 2}")

    def gradient_alone() -> None:
        lengths = [n for n in place.lengths if n < 700]
        got = [_gradients(asked, lengths), [torch.cat(t) for t in zip(*(_gradients(asked, [n]) for n in lengths), strict=True)]]
        for name, a, b in zip(("dq", "dk", "dv"), *got, strict=True):
            same(a, b, f"{name} of a pack of {lengths}")

    yield ask("attention: inference without pages gives what training gives", dense)
    yield ask("attention: prefill over pages gives what training gives", prefill)
    yield ask("attention: decode over pages gives the rows of the whole", decode)
    yield ask("attention: chunks over pages give the rows of the whole", chunks)
    yield ask("attention: a pack gives each sequence what it has alone", packs)
    yield ask("attention: a key that is not seen is not read", behind_the_mask)
    yield ask("attention: the gradient is the same from run to run", gradient)
    yield ask("attention: the gradient of a pack is that of its sequences", gradient_alone)
    yield ask("attention: stock engines' first version gives what the second gives", lambda: _versions(asked), needed=False)
    yield ask("attention: the device has the bytes of the CPU twin", like_the_twin, needed=False)


def _gradients(asked: Attention, lengths: list[int]) -> list[torch.Tensor]:
    q, k, v = (torch.cat(t) for t in zip(*(asked.qkv(n) for n in lengths), strict=True))
    starts = cumulative(lengths)
    o, lse = attention.attention(q, k, v, starts, starts, SCALE)
    return list(attention.attention_backward(o, q, k, v, o, lse, starts, starts, SCALE))


def _versions(asked: Attention) -> None:
    n = max(n for n in asked.place.lengths if n < 2000)
    q, k, v = asked.qkv(n)
    given = {"num_heads": HEADS, "num_key_value_heads": GROUPS, "scale": SCALE, "input_layout": "TND", "sparse_mode": CAUSAL}
    lengths = {"actual_seq_lengths": [n], "actual_seq_lengths_kv": [n]}
    o, _ = find("npu_fused_infer_attention_score")(q, k, v, atten_mask=causal(q.device), **lengths, **given)
    same(o, asked.want(n), f"{n} tokens")


def _rows(place: Place) -> Iterator[Answer]:
    most, k, n = max(place.rows), place.width, 96 if place.twin else 1536
    x, w = place.random(most, k, seed=1), place.random(n, k, seed=2)

    def product() -> None:
        whole = torch.mm(x, w.t())
        for rows in place.rows:
            same(torch.mm(x[:rows], w.t()), whole[:rows], f"the first {rows} of {most} rows")
            same(torch.mm(x[most - rows :], w.t()), whole[most - rows :], f"the last {rows} of {most} rows")

    def experts() -> None:
        weights = [place.random(n, k, seed=10 + e) for e in range(4)]
        ends = torch.tensor([0, most // 4, most // 4, most - 1, most], device=place.device)
        whole = grouped.grouped(x, weights, ends, 1, False, torch.bfloat16)
        for rows in (r for r in place.rows if r <= most // 4):
            few = torch.tensor([0, rows, rows, rows, rows], device=place.device)
            same(grouped.grouped(x[:rows], weights, few, 1, False, torch.bfloat16), whole[:rows], f"{rows} rows of an expert alone")

    def terms_ascend() -> None:
        one = torch.zeros(1, k).to(x)
        terms = torch.zeros(n, k).to(x)
        one[0, :4] = 1
        terms[:, :4] = torch.tensor([2.0**30, 1, -(2.0**30), 1]).to(x)
        got = grouped.grouped(one, [terms], torch.tensor([0, 1], device=place.device), 1, False, torch.bfloat16)
        same(got.cpu(), torch.ones(1, n).bfloat16(), "2^30 + 1 - 2^30 + 1 in one accumulator")

    def norms() -> None:
        for width in (128, 2048):
            rows, gamma = place.random(most, width, seed=3), place.random(width, seed=4)
            whole = norm.rms_norm(rows, gamma, 1e-6)
            for count in place.rows:
                same(norm.rms_norm(rows[:count], gamma, 1e-6), whole[:count], f"{count} of {most} rows of {width}")
                same(norm.rms_norm(rows[:count].unsqueeze(1), gamma, 1e-6).squeeze(1), whole[:count], f"{count} rows of {width} as heads")

    def norm_like_the_twin() -> None:
        for width in (128, 2048):
            rows, gamma = place.random(8, width, seed=3), place.random(width, seed=4)
            same(norm.rms_norm(rows, gamma, 1e-6).cpu(), twin.rms_norm(rows.cpu(), gamma.cpu(), 1e-6)[0], f"rows of {width}")

    def moves() -> None:
        tokens = place.random(most, 64, seed=6)
        ids = torch.randint(0, 8, (most, 2), generator=torch.Generator().manual_seed(7)).to(place.device)
        rows, where = permute.to_experts(tokens, ids)
        want, place_of = twin.permute(tokens.cpu(), ids.cpu())
        same(rows.cpu(), want, "rows sorted by expert, then token")
        same(where.cpu(), place_of, "where each choice went")
        same(permute.from_experts(rows, where, 2), tokens.unsqueeze(1).expand(-1, 2, -1).contiguous(), "there and back")

    yield ask("grouped product: a row does not see how many others there are", experts)
    yield ask("grouped product: one accumulator, terms ascending", terms_ascend)
    yield ask("RMSNorm: a row does not see how many others there are", norms)
    yield ask("permutation: sorted by expert and token, and back", moves)
    yield ask("RMSNorm: the device has the bytes of the CPU twin", norm_like_the_twin, needed=False)
    yield ask("torch.mm: a row does not see how many others there are", product, needed=False)


def levels(place: Place, level: int) -> Iterator[Answer]:
    """What a deterministic level changes; asked in a process of its own, since a level cannot be changed on the way."""
    x, w = place.random(max(place.rows), place.width, seed=1), place.random(96, place.width, seed=2)

    def repeats() -> None:
        first = torch.mm(x, w.t())
        for i in range(place.repeats):
            same(torch.mm(x, w.t()), first, f"run {i + 2}")

    def places() -> None:
        whole = torch.mm(x[:1].expand(x.shape[0], -1).contiguous(), w.t())
        same(whole, whole[:1].expand_as(whole).contiguous(), "the same row in every place")

    def batches() -> None:
        whole = torch.mm(x, w.t())
        for rows in place.rows:
            same(torch.mm(x[:rows], w.t()), whole[:rows], f"{rows} of {x.shape[0]} rows")

    yield ask(f"level {level}: torch.mm is the same from run to run", repeats, needed=False)
    yield ask(f"level {level}: torch.mm is the same in every place of a batch", places, needed=False)
    yield ask(f"level {level}: torch.mm is the same in every batch", batches, needed=False)

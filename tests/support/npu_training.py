"""One decoder layer of the family ``npu-910b``, trained without an NPU: forward, backward and exact sums over tokens.

The kernels are those that the family registers for an NPU (``kernels/<op>/npu.py``) on a device made in Python: torch_npu's operators by their CPU twins,
our Triton kernels interpreted, with the tiles of an NPU. Run in a process of its own: ``TRITON_INTERPRET=1 python -m tests.support.npu_training``.
"""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

import tests.support.toy_device as toy
from benchmarks import one_card
from tests.triton_kernels import interpreter
from tio_megatron.contract import Contract
from tio_megatron.kernels import integer_sum as sums
from tio_megatron.kernels import triton_family
from tio_megatron.kernels.integer_sum import IntegerSum
from tio_megatron.kernels.integer_sum import reference as sum_reference
from tio_megatron.kernels.linear import triton as product
from tio_megatron.kernels.npu import stand_in
from tio_megatron.layers import grads
from tio_megatron.layers.grains import Grains
from tio_megatron.testing import assert_same_bytes

SHAPE = one_card.Shape(layers=1, hidden=64, heads=2, kv_heads=1, head=128, experts=4, top_k=2, ffn=32, vocab=140)
CONTRACT = Contract(family="npu-910b")
GRAIN = 4
UNIT, SPLIT = -40, 40


def install() -> None:
    """The device and the family's kernels on it."""
    interpreter.install()
    stand_in.install()
    toy.install()
    toy.take_family("npu")


class Sums:
    """A sink that keeps exact sums on the device, and beside them what the definition makes of the same operands."""

    def __init__(self) -> None:
        self.found: dict[int, IntegerSum] = {}
        self.wanted: dict[int, IntegerSum] = {}
        self.after_one: list[Tensor] = []

    def _of(self, weight: Tensor) -> tuple[IntegerSum, IntegerSum]:
        key = weight.data_ptr() if not isinstance(weight, toy.Toy) else weight.held.data_ptr()
        if key not in self.found:
            self.found[key] = IntegerSum.empty(weight.shape, UNIT, SPLIT, device="toy")
            self.wanted[key] = IntegerSum.empty(weight.shape, UNIT, SPLIT)
        return self.found[key], self.wanted[key]

    def products(self, weights: Sequence[Tensor], dy: Tensor, x: Tensor, grains: Grains) -> list[Tensor | None]:
        """Each weight's rows in grains of ``GRAIN``, in place of the one that a layer without labels gives."""
        starts, of, order = (toy.take(part) for part in (grains.starts, grains.of, grains.order))
        edges = starts[of].tolist()
        cut = [list(range(lo, hi, GRAIN)) for lo, hi in zip(edges[:-1], edges[1:], strict=True)]
        starts = torch.tensor([*(start for one in cut for start in one), edges[-1]])
        of = torch.tensor([0, *(len(one) for one in cut)]).cumsum(0)
        pairs = [self._of(weight) for weight in weights]
        sums.add_products([mine for mine, _ in pairs], dy, x, starts=starts, of=of, order=order)
        left, right = toy.take(dy), toy.take(x)
        for (_, wanted), first, last in zip(pairs, of.tolist()[:-1], of.tolist()[1:], strict=True):
            for lo, hi in zip(starts[first:last].tolist(), starts[first + 1 : last + 1].tolist(), strict=True):
                rows = torch.arange(lo, hi) if order is None else order[lo:hi]
                sum_reference.add_partials(wanted, product.matmul(left[rows].t(), right[rows].t(), 1, False, torch.float32))
        return [None] * len(weights)

    def rows(self, weight: Tensor, dy: Tensor, ids: Tensor) -> Tensor | None:
        """A table's."""
        mine, wanted = self._of(weight)
        sums.add_rows(mine, dy, ids)
        sum_reference.add_rows(wanted, toy.take(dy), toy.take(ids))

    def norm(self, weight: Tensor, dy: Tensor, x: Tensor, eps: float, total: Tensor) -> Tensor | None:
        """A norm's."""
        mine, wanted = self._of(weight)
        sums.add_norm_terms(mine, dy, x, eps)
        sum_reference.add_norm_terms(wanted, toy.take(dy), toy.take(x), eps)


def trained(pieces: Sequence[Tensor]) -> tuple[dict[str, Tensor], Sums, Tensor]:
    """The gradients of all weights after one backward pass for each sequence, ``name -> fp32``; the sums; and the scores."""
    given = {name: toy.Toy(w, requires_grad=True) for name, w in SHAPE.weights(1, "cpu").items()}
    sink, scores = Sums(), []
    before = grads.use(sink)
    try:
        for ids in pieces:
            found = one_card.train_scores(SHAPE, given, toy.Toy(ids), CONTRACT)
            found.sum().backward()
            scores.append(toy.take(found.detach()))
            if len(scores) == 1:
                sink.after_one = [toy.take(one.low).clone() for one in sink.found.values()]
    finally:
        grads.use(before)
    out = {}
    for number, (mine, wanted) in enumerate(zip(sink.found.values(), sink.wanted.values(), strict=True)):
        for part in ("low", "high", "peak"):
            assert_same_bytes(toy.take(getattr(mine, part)), getattr(wanted, part), f"sum {number}, {part}")
        fp32 = toy.give(torch.empty(mine.low.shape))
        held = sums.value(mine.low, mine.high, mine.unit, mine.split, fp32)
        out[str(number)] = toy.take(held).clone()
        assert_same_bytes(out[str(number)], sum_reference.value(wanted.low, wanted.high, UNIT, SPLIT), f"value {number}")
    return out, sink, torch.cat(scores)


def main() -> None:
    """Train on two sequences, compare, and say what ran."""
    install()
    with mock.patch.object(triton_family, "small", lambda device: True):
        first, second = torch.arange(6) * 7 % 140, torch.arange(3) * 11 % 140
        found, sink, scores = trained([first, second])
    assert all(grad.isfinite().all() for grad in found.values())
    final = [toy.take(one.low) for one in sink.found.values()]
    # The padded head is a new tensor in every pass, and so has a sum of its own in each.
    changed = sum(not torch.equal(a, b) for a, b in zip(final, sink.after_one, strict=False))
    assert changed > len(final) // 2, f"negative control: the second sequence changes {changed} sums of {len(final)}"
    wanted = {"attention", "attention_backward", "rms_norm", "rms_norm_backward", "grouped", "matmul", "swiglu_backward", "route_backward", "rope"}
    wanted |= {"add_products", "add_rows", "add_norm_terms", "sum_value", "combine_backward", "logprob_backward"}
    assert wanted <= set(toy.calls), wanted - set(toy.calls)
    print(f"{len(found)} sums of one layer have the bytes of the definition, after {len(scores)} scored tokens")


if __name__ == "__main__":
    main()

"""What a whole decoder layer costs an NPU in calls and in waits, counted on the CPU twins, beside a step that goes sequence by sequence and expert by expert.

An operator of the contract that is torch_npu's runs as ``kernels/<op>/npu.py`` has it, its own calls counted; one that is our Triton kernel's is one call,
and the CPU's kernel stands in for it. What such a wrapper does around its launch (a buffer, a stride) is not seen here.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tio_megatron.contract import ReductionTree
from tio_megatron.kernels import attention, linear, rope
from tio_megatron.kernels.combine import combine
from tio_megatron.kernels.grouped import grouped_linear
from tio_megatron.kernels.rope import rope_table
from tio_megatron.kernels.swiglu import swiglu
from tio_megatron.layers import linear as products
from tio_megatron.layers import norm, router
from tio_megatron.layers.dispatch import AllToAll, ExpertGroups
from tio_megatron.layers.experts import finish_sum
from tio_megatron.layers.experts_replicated import experts_replicated
from tio_megatron.layers.permute import plan_rows
from tio_megatron.testing import assert_same_bytes, run_ranks

HIDDEN, HEADS, GROUPS, SIZE, PAGE = 128, 4, 2, 128, 128
EXPERTS, TOP_K, FFN, EPS, LEAVES = 8, 2, 32, 1e-6, 4
SCALE = SIZE**-0.5
_PLACES = {"attention_paged": "attention", "write_pages": "attention", "rms_norm": "norm", "grouped": "grouped"}
VENDOR = {name: importlib.import_module(f"tio_megatron.kernels.{folder}.npu").KERNELS[name] for name, folder in _PLACES.items()}
"""The contract's operators in this layer that torch_npu has."""
FREE = {"aten::detach", "aten::is_same_size", "aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}
WAITING = {"item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "bincount", "__bool__", "__int__", "__index__", "__float__"}
"""Methods of a tensor whose answer, or the size of it, is on the device."""


class Waits(TorchFunctionMode):
    """Questions to tensors that would lie on the device: all but those that ``host`` names."""

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self.host = {t.untyped_storage().data_ptr() for t in host}
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "repeat_interleave" and "output_size" not in (kwargs or {}):
            self.seen[name] += 1
        if name in WAITING and isinstance(args[0], Tensor) and args[0].untyped_storage().data_ptr() not in self.host:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    """Calls of the device by name; the contract's operators run as on an NPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        vendor = VENDOR.get(name.removeprefix("tio::")) if name.startswith("tio::") else None
        if vendor is not None:
            with self:
                return vendor(*args, **(kwargs or {}))
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):  # seen whole inside a vendor's kernel: what it is made of
            with self:
                return func.decompose(*args, **(kwargs or {}))
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.returns)
        if not views and name not in FREE:
            self.seen[name] += 1
        with torch._C.DisableTorchFunction():  # what stands in for a kernel of the device may ask
            return func(*args, **(kwargs or {}))


class Step:
    """Sequences that each decode one token in one layer."""

    def __init__(self, lengths: list[int]) -> None:
        torch.manual_seed(len(lengths))
        shapes = {"qkv": ((HEADS + 2 * GROUPS) * SIZE, HIDDEN), "o": (HIDDEN, HEADS * SIZE), "gate": (EXPERTS, HIDDEN)}
        shapes |= {"w13": (EXPERTS, 2 * FFN, HIDDEN), "w2": (EXPERTS, HIDDEN, FFN)}
        self.w = {name: (torch.randn(shape) * shape[-1] ** -0.5).bfloat16() for name, shape in shapes.items()}
        self.w |= {name: torch.randn(width).bfloat16() for name, width in (("in", HIDDEN), ("post", HIDDEN), ("q", SIZE), ("k", SIZE))}
        count = -(-max(lengths) // PAGE)
        self.x = torch.randn(len(lengths), HIDDEN).bfloat16()
        self.cache = torch.randn(len(lengths) * count, GROUPS, PAGE, 2 * SIZE).bfloat16()
        self.blocks = torch.arange(len(lengths) * count, dtype=torch.int32).view(len(lengths), count)
        self.at = torch.tensor(lengths) - 1
        self.slots = self.blocks[torch.arange(len(lengths)), self.at // PAGE].long() * PAGE + self.at % PAGE
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
        self.table = rope_table(max(lengths), SIZE, 1e6)
        self.one = torch.tensor([0, 1], dtype=torch.int32)

    @property
    def host(self) -> list[Tensor]:
        """What an engine keeps on the host."""
        return [self.seq_lens, self.starts, self.one]

    def heads(self, fused: Tensor) -> list[Tensor]:
        return [t.unflatten(1, (-1, SIZE)) for t in fused.split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE], 1)]


def ours(s: Step) -> Tensor:
    """One layer, all sequences and experts at once."""
    h = norm.rms_norm(s.x, s.w["in"], EPS)
    q, k, v = s.heads(products.column_parallel(h, s.w["qkv"]))
    q = rope.rope(norm.rms_norm(q, s.w["q"], EPS), s.at, s.table)
    k = rope.rope(norm.rms_norm(k, s.w["k"], EPS), s.at, s.table)
    attention.write_pages(k, v, s.cache, s.slots)
    o = attention.attention_paged(q, s.cache, s.blocks, s.seq_lens, s.starts, scale=SCALE)
    x = s.x + products.row_parallel(o.flatten(1), s.w["o"], leaves=LEAVES)
    h = norm.rms_norm(x, s.w["post"], EPS)
    ids, probs = router.route_tokens(router.router_logits(h, s.w["gate"]), TOP_K, normalise=True)
    return x + experts_replicated(h, ids, probs, list(s.w["w13"].unbind()), list(s.w["w2"].unbind()), experts=EXPERTS, leaves=1)


def naive(s: Step) -> Tensor:
    """The same, q, k and v by a product each, sequence by sequence, expert by expert, with sizes that the device is asked for."""
    rows = []
    for i in range(len(s.x)):
        length = int(s.at[i].item()) + 1
        h = norm.rms_norm(s.x[i : i + 1], s.w["in"], EPS)
        parts = s.w["qkv"].split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE])
        q, k, v = (linear.linear(h, w.contiguous(), leaves=1).unflatten(1, (-1, SIZE)) for w in parts)
        q = rope.rope(norm.rms_norm(q, s.w["q"], EPS), s.at[i : i + 1], s.table)
        k = rope.rope(norm.rms_norm(k, s.w["k"], EPS), s.at[i : i + 1], s.table)
        attention.write_pages(k, v, s.cache, s.slots[i : i + 1])
        o = attention.attention_paged(q, s.cache, s.blocks[i : i + 1], torch.tensor([length], dtype=torch.int32), s.one, scale=SCALE)
        x = s.x[i : i + 1] + linear.linear(o.flatten(1), s.w["o"], leaves=LEAVES)
        h = norm.rms_norm(x, s.w["post"], EPS)
        ids, probs = router.route_tokens(router.router_logits(h, s.w["gate"]), TOP_K, normalise=True)
        plan = plan_rows(ids, 0, EXPERTS)
        out = []
        for e in range(EXPERTS):
            here = (ids == e).any(1).nonzero().squeeze(1)
            if len(here):
                some = torch.tensor([0, len(here)])
                up = grouped_linear(h[here], [s.w["w13"][e]], some, leaves=1)
                out.append(grouped_linear(swiglu(up), [s.w["w2"][e]], some, leaves=1))
        nodes = combine(torch.cat(out), plan.index, ids, probs, experts=EXPERTS, nodes=ReductionTree(EXPERTS).frontier(0, EXPERTS))
        rows.append(x + finish_sum(nodes[0], ids, x.dtype))
    return torch.cat(rows)


def counted(layer: Callable[[Step], Tensor], step: Step) -> tuple[Tensor, Counter[str], Counter[str]]:
    with torch.no_grad():
        with Calls():
            layer(step)  # masks are made once for a device
        with Waits(step.host) as waits, Calls() as calls:
            out = layer(step)
    return out, calls.seen, waits.seen


LENGTHS = [130, 7, 256, 300, 1, 2, 3, 128]


def test_a_layer_waits_for_nothing_and_its_calls_do_not_grow() -> None:
    _, few, waits = counted(ours, Step(LENGTHS[:2]))
    _, many, more = counted(ours, Step(LENGTHS))
    print(f"calls of a layer: {sum(many.values())}: {dict(many)}")
    assert not waits and not more, (waits, more)
    assert few == many
    assert many["aten::clone"] == 3  # queries, keys and values, out of the fused rows
    assert sum(many.values()) <= 48, many
    assert not any("format_cast" in name or name == "aten::_local_scalar_dense" for name in many)


def test_the_naive_step_has_the_same_bytes_for_many_more_calls_and_waits() -> None:
    step = Step(LENGTHS)
    fast, few, _ = counted(ours, step)
    slow, many, waits = counted(naive, step)
    print(f"calls of the naive step: {sum(many.values())}, waits: {sum(waits.values())}")
    assert_same_bytes(slow, fast, "naive step")
    assert waits["item"] == len(LENGTHS) and waits["nonzero"] == EXPERTS * len(LENGTHS) and waits["tolist"]
    assert sum(many.values()) > 8 * sum(few.values())


def test_a_question_to_the_device_is_seen() -> None:
    host = torch.tensor([1])
    with Waits([host]) as waits:
        host.tolist()
        assert not waits.seen
        torch.tensor([1]).tolist()
    assert waits.seen == {"tolist": 1}


@pytest.mark.parametrize(("span", "padded", "waits"), [((0, EXPERTS), False, 0), ((0, EXPERTS // 2), False, 1), ((0, EXPERTS // 2), True, 0)])
def test_rows_of_some_experts_are_asked_for_once(span: tuple[int, int], padded: bool, waits: int) -> None:
    """Experts of other ranks leave a number of rows that only the device knows; few tokens take a row for every choice."""
    ids = torch.arange(8).view(4, 2)
    with Waits([]) as seen:
        plan_rows(ids, *span, every=span == (0, EXPERTS), padded=padded)
    assert sum(seen.seen.values()) == waits


def exchanged(rank: int) -> Counter[str]:
    ids = torch.arange(8).view(4, 2)
    with Waits([]) as waits:
        way = AllToAll(ids, ExpertGroups(EXPERTS, ep=dist.group.WORLD, all=dist.group.WORLD))
        way.collect(way.dispatch(way.spread(torch.ones(4, HIDDEN))))
    return waits.seen


def test_a_trainers_exchange_waits_once() -> None:
    for seen in run_ranks(2, exchanged):
        assert seen == {"tolist": 1}, seen

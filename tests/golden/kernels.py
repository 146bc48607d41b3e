"""Hashes of what every operator gives for fixed inputs, in ``kernels.txt``. To make it again:

    python -m tests.golden.kernels

It refuses while bytes of a known line differ and ``kernels.version()`` is still the one in the file: a trainer and a rollout with other bytes
must not take each other for the same. The inside of a packed weight or a page is no result and has no hash. Inputs are raw PCG64 words turned
into floats by integer steps, so no random-number release of torch or numpy can change them.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tio_megatron import kernels
from tio_megatron.contract import ReductionTree, VocabOrder
from tio_megatron.kernels import library
from tio_megatron.kernels.adam import Scalars, adam_
from tio_megatron.kernels.attention import attention, attention_backward, attention_paged, write_pages
from tio_megatron.kernels.combine import combine, combine_backward
from tio_megatron.kernels.embedding import embedding, embedding_backward
from tio_megatron.kernels.grouped import PackedExperts, grouped_dgrad, grouped_linear, grouped_wgrad
from tio_megatron.kernels.integer_sum import IntegerSum, add_norm_terms, add_products, add_rows, value
from tio_megatron.kernels.linear import PackedWeight, linear, matmul
from tio_megatron.kernels.logprob import entropy, entropy_backward, gather_logprob, log_softmax, logprob_backward, vocab_max, vocab_sumexp
from tio_megatron.kernels.math import exp, log, tree_add
from tio_megatron.kernels.norm import add_rms_norm, rms_norm, rms_norm_backward
from tio_megatron.kernels.rope import rope, rope_backward, rope_table
from tio_megatron.kernels.router import balance_backward, balance_sums, balance_value, balance_weights, route, route_backward, scores
from tio_megatron.kernels.squares import add_squares_, empty_sum, scale_
from tio_megatron.kernels.swiglu import silu, silu_backward, swiglu, swiglu_backward

FILE = Path(__file__).with_suffix(".txt")
COMMAND = "python -m tests.golden.kernels"
F32 = torch.float32


class Source:
    """A stream of fixed numbers."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def floats(self, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        """Both signs, 23 random bits, magnitudes from 2**-5 to 4: sums of them round differently in every order."""
        words = self._bits.random_raw(int(np.prod(shape)))
        exponents = np.uint32(122) + ((words >> np.uint64(40)) % np.uint64(7)).astype(np.uint32)
        raw = (words & np.uint64(0x807FFFFF)).astype(np.uint32) | exponents << np.uint32(23)
        return torch.from_numpy(raw.view(np.float32).reshape(shape)).to(dtype)

    def below(self, bound: int, *shape: int) -> torch.Tensor:
        """int64 from 0 to ``bound`` - 1."""
        words = self._bits.random_raw(int(np.prod(shape)))
        return torch.from_numpy((words % np.uint64(bound)).astype(np.int64).reshape(shape))


def _products(s: Source, d: torch.dtype) -> Iterator[tuple[str, object]]:
    x, w = s.floats(9, 1200, dtype=d), s.floats(70, 1200, dtype=d)
    yield "linear", [linear(x, w, leaves=leaves, out_dtype=out) for leaves in (1, 8) for out in (None, F32)]
    packed = PackedWeight.from_weight(w)
    yield "linear packed", [packed.unpack(), *(linear(x[:rows], packed, leaves=8) for rows in (1, 9))]
    dy = s.floats(9, 70, dtype=d)
    yield "matmul", [matmul(dy, w.t()), matmul(dy.t(), x.t()), matmul(x, w, leaves=2, paired=True, out_dtype=d)]
    offsets, experts = torch.tensor([0, 4, 4, 9]), s.floats(3, 70, 1200, dtype=d)
    yield "grouped", [grouped_linear(x, experts, offsets, leaves=leaves) for leaves in (1, 8)]
    many = PackedExperts.from_weights(experts)
    yield "grouped packed", [many.unpack(), grouped_linear(x, many, offsets, leaves=8)]
    yield "grouped backward", [grouped_dgrad(dy, experts, offsets, leaves=5, paired=True), grouped_wgrad(dy, x, offsets)]


def _attention(s: Source, d: torch.dtype) -> Iterator[tuple[str, object]]:
    # Two sequences: one whole, one the last 5 tokens of 135 (three blocks of 64 keys, the last short).
    cu_q, cu_k = torch.tensor([0, 70, 75], dtype=torch.int32), torch.tensor([0, 70, 205], dtype=torch.int32)
    q, do = s.floats(75, 4, 48, dtype=d), s.floats(75, 4, 48, dtype=d)
    k, v = s.floats(205, 2, 48, dtype=d), s.floats(205, 2, 48, dtype=d)
    o, lse = attention(q, k, v, cu_q=cu_q, cu_k=cu_k, scale=0.144)
    yield "attention", [o, lse]
    yield "attention backward", attention_backward(do, q, k, v, o, lse, cu_q=cu_q, cu_k=cu_k, scale=0.144)
    cache = torch.zeros(6, 2, 64, 96, dtype=d)
    table = torch.tensor([[4, 0, 0], [1, 5, 2]], dtype=torch.int32)
    places = torch.cat([torch.arange(70), 192 + torch.arange(135)])
    pages = torch.tensor([4, 0, 0, 1, 5, 2])[places // 64]
    write_pages(k, v, cache, pages * 64 + places % 64)
    yield "pages", [attention_paged(q, cache, table, torch.tensor([70, 135], dtype=torch.int32), cu_q, scale=0.144)]


def _elementwise(s: Source, d: torch.dtype) -> Iterator[tuple[str, object]]:
    x, residual, w, dy = s.floats(5, 700, dtype=d), s.floats(5, 700, dtype=d), s.floats(700, dtype=d), s.floats(5, 700, dtype=d)
    yield "rms norm", [rms_norm(x, w, 1e-6), *add_rms_norm(x, residual, w, 1e-6)]
    yield "rms norm backward", rms_norm_backward(dy, x, w, 1e-6)
    yield "silu", [silu(x), swiglu(x)]
    yield "silu backward", [silu_backward(dy, x), swiglu_backward(dy[:, :350], x)]
    heads, positions, table = s.floats(6, 3, 48, dtype=d), s.below(20, 6), s.floats(20, 48)
    yield "rope", [rope(heads, positions, table)]
    yield "rope backward", [rope_backward(heads, positions, table)]
    ids = s.below(60, 4, 30)
    yield "embedding", [embedding(ids, x.view(50, 70), 7)]
    yield "embedding backward", [embedding_backward(s.floats(4, 30, 70, dtype=d), ids, 50, 7)]
    rows, dout, probs = s.floats(24, 70, dtype=d), s.floats(8, 70, dtype=d), s.floats(8, 3)
    index, chosen = s.floats(24).argsort().view(8, 3), torch.sort(s.floats(8, 16).argsort(dim=1)[:, :3]).values
    index[2, 1] = index[5] = -1
    tree = ReductionTree(16)
    yield "combine", [combine(rows, index, chosen, probs, experts=16, nodes=nodes) for nodes in ([tree.root], tree.frontier(3, 11))]
    yield "combine backward", combine_backward(dout, rows, index, probs)


def _gradients(s: Source, d: torch.dtype) -> Iterator[tuple[str, object]]:
    def of(total: IntegerSum) -> list[torch.Tensor]:
        return [total.low, total.high, total.peak, value(total.low, total.high, total.unit, total.split, torch.empty(total.low.shape))]

    # Partials from 4 on are the large ones: both parts are used.
    weight, rows, norm = (IntegerSum.empty(shape, -30, 32) for shape in ((30, 70), (20, 70), (70,)))
    dy, x = s.floats(300, 30, dtype=d), s.floats(300, 70, dtype=d)
    add_products(weight, dy, x, starts=torch.tensor([0, 260, 260, 263, 300]))
    yield "integer sum of products", of(weight)
    add_rows(rows, x * 2, s.below(20, 300))
    yield "integer sum of rows", of(rows)
    add_norm_terms(norm, s.floats(300, 70, dtype=d) * 4, x, 1e-6)
    yield "integer sum of norm terms", of(norm)


def _optimizer(s: Source) -> Iterator[tuple[str, object]]:
    for decoupled in (True, False):
        state = [s.floats(700), s.floats(700), s.floats(700), s.floats(700).square()]
        out = torch.empty(700, dtype=torch.bfloat16)
        adam_(*state, Scalars.at(3, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=decoupled), out)
        yield f"adam, {'decoupled' if decoupled else 'L2'}", [*state, out]
    total, x = empty_sum(), s.floats(700)
    add_squares_(total, x)
    scale_(x, 0.3)
    yield "squares", [total, x]


def _scores(s: Source) -> Iterator[tuple[str, object]]:
    wide = torch.cat([s.floats(600) * 16, s.floats(50) * 2**-20, torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, 88.5, -104.0])])
    yield "exp", [exp(wide)]
    yield "log", [log(wide.abs())]
    yield "tree add", [tree_add(s.floats(count, 300)) for count in (1, 3, 8, 13)]
    # The angles are torch's float64: equal on processors of other vector lengths, or two machines would not agree.
    yield "rope table", [rope_table(3000, 128, 1e6)]
    logits, dprobs = s.floats(7, 37), s.floats(7, 4)
    yield "router scores", [scores(logits)]
    ids, probs = route(logits, 4)
    yield "route", [ids, probs, *route(logits, 4, False)]
    yield "route backward", [route_backward(dprobs, logits, ids, normalise) for normalise in (True, False)]
    order, x = VocabOrder(vocab=2700, runs=8), s.floats(5, 2816)
    top = vocab_max(x, 2700)
    parts = vocab_sumexp(x[:, 1024:], top, order, 1024, order.padded)
    whole = vocab_sumexp(x, top, order, 0, order.padded)
    yield "vocabulary sums", [top, parts, whole]
    yield "log softmax", [log_softmax(x, order), gather_logprob(x[:, 0].contiguous(), top, whole[0])]
    yield "log softmax backward", [logprob_backward(s.floats(5), x, top, whole[0], s.below(3000, 5), 2700)]
    turned = vocab_sumexp(x, top, order, 0, order.padded, weighted=True)[0]
    yield "entropy", [turned, entropy(whole[0], turned), entropy_backward(s.floats(5), x, top, whole[0], turned, 2700)]


def _balance(s: Source) -> Iterator[tuple[str, object]]:
    logits, samples = s.floats(40, 37), s.below(4, 40) - 1
    sums = balance_sums(logits, route(logits, 4)[0], samples, 3)
    weights = balance_weights(sums, 0.01)
    yield "balance", [sums, weights, balance_value(sums, 4), balance_backward(logits, weights, samples)]


def results() -> Iterator[tuple[str, object]]:
    """(name, tensors) of every case, with the instruction set in force."""
    for seed, dtype in enumerate((F32, torch.bfloat16)):
        for number, cases in enumerate((_products, _attention, _elementwise, _gradients)):
            for name, tensors in cases(Source(10 * seed + number), dtype):
                yield f"{name}, {'fp32' if dtype == F32 else 'bf16'}", tensors
    yield from _scores(Source(100))
    yield from _optimizer(Source(101))
    yield from _balance(Source(102))


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tio":
            name = func._schema.name.removeprefix("tio::")
            self.first.setdefault(name, (func, tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)))
        return func(*args, **(kwargs or {}))


def calls() -> dict[str, tuple[Any, Any]]:
    """Every torch operator that the cases call, with the arguments of its first call as they were before."""
    with _Calls() as found:
        for _ in results():
            pass
    return found.first


def registered() -> set[str]:
    """The names of all torch operators of this package."""
    for room in filter(lambda module: module.ispkg, pkgutil.iter_modules(kernels.__path__)):
        importlib.import_module(f"{kernels.__name__}.{room.name}")
    return {name.removeprefix("tio::").split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tio::")}


def hashes() -> dict[str, str]:
    """Name -> 16 hex digits over types, shapes and bytes."""
    return {name: _hash(tensors) for name, tensors in results()}


def _hash(tensors: object) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:  # type: ignore[attr-defined]
        whole.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes(tensor.untyped_storage()))
    return whole.hexdigest()[:16]


def read() -> tuple[str, dict[str, str]]:
    """The version in the file, and its hashes."""
    version, *lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    return version.removeprefix("version "), {name: value for value, name in (line.split("  ", 1) for line in lines)}


def changed(found: dict[str, str]) -> list[str]:
    """Known names with other bytes."""
    return sorted(name for name, value in read()[1].items() if found.get(name, value) != value)


def main() -> int:
    """Write the file."""
    found = hashes()
    for isa in library.supported_isas():
        with library.using_isa(isa):
            if hashes() != found:
                print(f"instruction sets differ: {isa} and {library.isa()}", file=sys.stderr)
                return 1
    if FILE.exists() and read()[0] == kernels.version() and changed(found):
        print(ADVICE.format(names=", ".join(changed(found)), version=kernels.version()), file=sys.stderr)
        return 1
    head = f"# What every operator gives for fixed inputs, the same on every processor. Made by: {COMMAND}\nversion {kernels.version()}\n"
    FILE.write_text(head + "".join(f"{value}  {name}\n" for name, value in found.items()))
    return 0


ADVICE = (
    "other bytes than in tests/golden/kernels.txt: {names}. If that is on purpose, raise tio_version() in tio_megatron/kernels/csrc/isa.cpp "
    "(now {version}), build, and run: " + COMMAND
)

if __name__ == "__main__":
    sys.exit(main())

"""What the process around an operator may do: other default types and devices, flush-to-zero, tracing. No byte changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.golden import kernels as golden
from tio_megatron.contract import ReductionTree, VocabOrder
from tio_megatron.kernels import adam, attention, combine, embedding, integer_sum, logprob, math, norm, rope, router, squares, swiglu
from tio_megatron.testing import assert_same_bytes


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "x": normal(3, 300).bfloat16(),
        "w": normal(300).bfloat16(),
        "heads": normal(3, 4, 64).bfloat16(),
        "keys": normal(3, 2, 64).bfloat16(),
        "positions": torch.tensor([0, 7, 3]),
        "logits": normal(3, 16),
        "rows": normal(6, 32).bfloat16(),
        "index": torch.arange(6).view(3, 2),
        "ids": torch.tensor([[0, 3], [1, 2], [4, 15]]),
        "probs": normal(3, 2).abs(),
        "cu": torch.tensor([0, 1, 3], dtype=torch.int32),
        "cache": torch.zeros(2, 2, 64, 128).bfloat16(),
        "table": torch.tensor([[0], [1]], dtype=torch.int32),
        "lengths": torch.tensor([1, 2], dtype=torch.int32),
        "slots": torch.tensor([0, 64, 65]),
        "top": torch.zeros(3),
        "sum": torch.full((3,), 9.0),
    }


def _paged(i: dict[str, torch.Tensor]) -> torch.Tensor:
    attention.write_pages(i["keys"], i["keys"], i["cache"], i["slots"])
    return attention.attention_paged(i["heads"], i["cache"], i["table"], i["lengths"], i["cu"], scale=0.125)


def _integer_sums(i: dict[str, torch.Tensor]) -> Any:
    found: list[torch.Tensor] = []
    for unit in (-150, -50):  # with the first, subnormal partials count and others are beyond the limit
        products, rows, terms = (integer_sum.IntegerSum.empty(shape, unit) for shape in ((300, 300), (8, 32), (300,)))
        integer_sum.add_products(products, i["x"], i["x"], starts=torch.tensor([0, 2, 3], device="cpu"))
        integer_sum.add_rows(rows, i["rows"][:3], i["positions"])
        integer_sum.add_norm_terms(terms, i["x"], i["x"], 1e-6)
        out = torch.empty(8, 32, dtype=torch.float32, device="cpu")
        found += [integer_sum.value(rows.low, rows.high, unit, 50, out)]
        found += [part for total in (products, rows, terms) for part in (total.low, total.high, total.peak)]
    return found


SCALARS = adam.Scalars.at(3, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def _steps(i: dict[str, torch.Tensor]) -> Any:
    small = (i["logits"].view(torch.int32) & 0x807FFFFF - (1 << 32)).view(torch.float32)  # subnormal
    held = [i["logits"].clone(), small.clone(), small.clone(), small.clone()]
    adam.adam_(*held, SCALARS, i["logits"].bfloat16())
    total = squares.empty_sum()
    squares.add_squares_(total, held[2])
    squares.scale_(held[2], 0.5)
    return held, total


def _attention(i: dict[str, torch.Tensor]) -> Any:
    q, k = i["heads"], i["keys"]
    where = {"cu_q": i["cu"], "cu_k": i["cu"], "scale": 0.125}
    o, lse = attention.attention(q, k, k, **where)  # type: ignore[arg-type]
    return o, lse, attention.attention_backward(q, q, k, k, o, lse, **where)  # type: ignore[arg-type]


ORDER = VocabOrder(16, 2)
CALLS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "optimizer": _steps,
    "norm": lambda i: (
        norm.rms_norm(i["x"], i["w"], 1e-6),
        norm.add_rms_norm(i["x"], i["x"], i["w"], 1e-6),
        norm.rms_norm_backward(i["x"], i["x"], i["w"], 1e-6),
    ),
    "rope": lambda i: rope.rope(i["heads"], i["positions"], rope.rope_table(11, 64, 1e4)),
    "swiglu": lambda i: (swiglu.swiglu(i["x"]), swiglu.silu(i["x"]), swiglu.silu_backward(i["x"], i["x"])),
    "router": lambda i: (router.route(i["logits"], 2), router.scores(i["logits"]), router.route_backward(i["probs"], i["logits"], i["ids"])),
    "combine": lambda i: (
        combine.combine(i["rows"], i["index"], i["ids"], i["probs"], experts=16, nodes=[ReductionTree(16).root]),
        combine.combine_backward(i["rows"][:3], i["rows"], i["index"], i["probs"]),
    ),
    "embedding": lambda i: (embedding.embedding(i["positions"], i["rows"], 2), embedding.embedding_backward(i["rows"][:3], i["positions"], 8)),
    "logprob": lambda i: (
        logprob.log_softmax(i["logits"], ORDER),
        logprob.vocab_max(i["logits"], 16),
        logprob.vocab_sumexp(i["logits"], i["top"], ORDER, 0, 16),
        logprob.vocab_sumexp(i["logits"], i["top"], ORDER, 0, 16, weighted=True),
        logprob.entropy(i["sum"], i["top"]),
        logprob.entropy_backward(i["sum"], i["logits"], i["top"], i["sum"], i["top"], 16),
        logprob.gather_logprob(i["top"], i["top"], i["sum"]),
        logprob.logprob_backward(i["sum"], i["logits"], i["top"], i["sum"], i["positions"], 16),
    ),
    "math": lambda i: (math.exp(i["logits"]), math.log(i["probs"]), math.tree_add(i["logits"])),
    "integer_sum": _integer_sums,
    "attention": _attention,
    "paged": _paged,
}


@pytest.mark.parametrize("name", CALLS)
def test_default_type_and_device(name: str) -> None:
    """vLLM builds and runs models with bf16 as torch's default type."""
    inputs = _inputs()
    wanted = CALLS[name](inputs)
    rope.rope_table.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same_bytes(CALLS[name](inputs), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    rope.rope_table.cache_clear()
    with torch.device("meta"):
        assert_same_bytes(CALLS[name](inputs), wanted)


@pytest.mark.parametrize("name", CALLS)
def test_flush_to_zero_is_off_inside_and_given_back(name: str) -> None:
    inputs = _inputs()
    for tensor in inputs.values():
        if tensor.is_floating_point():
            tensor.view(-1)[0] = 1e-39  # subnormal in both types
    wanted = CALLS[name](inputs)
    torch.set_flush_denormal(True)
    try:
        got = CALLS[name](inputs)
        still_on = (torch.tensor([1e-40]) * 0.5).view(torch.int32).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert_same_bytes(got, wanted)
    assert still_on


def checked(operator: Any, arguments: Any) -> None:
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.parametrize("name", sorted(golden.registered()))
def test_schemas_and_shape_functions(name: str, calls: dict[str, tuple[Any, Any]]) -> None:
    """What torch is told of an operator is what it does: mutation, aliasing, shapes and types without data."""
    checked(*calls[name])


@pytest.fixture(scope="module")
def calls() -> dict[str, tuple[Any, Any]]:
    return golden.calls()


def test_what_is_not_so_is_seen() -> None:
    """Negative control: a shape function that is wrong, and a write that is not declared."""
    library = torch.library.Library("tio_wrong", "FRAGMENT")
    library.define("shape(Tensor x) -> Tensor")
    library.define("write(Tensor x) -> ()")
    library.impl("shape", lambda x: x[1:].clone(), "CPU")
    library.impl("write", lambda x: x.zero_() and None, "CPU")
    torch.library.register_fake("tio_wrong::shape", torch.empty_like, lib=library)
    torch.library.register_fake("tio_wrong::write", lambda x: None, lib=library)
    for operator in (torch.ops.tio_wrong.shape.default, torch.ops.tio_wrong.write.default):
        with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
            checked(operator, (torch.ones(3, 2),))

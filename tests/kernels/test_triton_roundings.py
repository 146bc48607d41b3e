"""No kernel of Triton approximates: what the compiler for sm_90 makes of each, and of each with a plain ``/`` or ``tl.sqrt`` planted in it."""

from __future__ import annotations

import functools
import importlib.util
import re

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: it has no build for this processor", allow_module_level=True)

import triton
import triton.language as tl

from tests.support import planted_kernels
from tio_megatron.kernels import triton_report
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

LAUNCHES = {
    "adam.triton:_adam": "adam",
    "attention.triton:_forward": "attention",
    "logprob.triton:_ends": "entropy",
    "logprob.triton:_rows": "entropy_backward",
    "norm.triton:_backward": "rms_norm_backward",
    "norm.triton:_inverse": "rms_norm of heads",
    "router.triton:_balance_backward": "balance_backward",
    "router.triton:_route": "route",
    "router.triton:_route_backward": "route_backward",
    "router.triton:_softmax": "router_scores",
    "swiglu.triton:_silu": "silu",
    "swiglu.triton:_slope": "silu_backward",
    "swiglu.triton:_swiglu": "swiglu",
}
"""Every function that divides or takes roots, and a launch of the report in which it does."""


@functools.cache
def compiled(what: str) -> tuple[triton_report.Compiled, ...]:
    with triton_report.compiling() as found:
        triton_report.launches()[what]()
    return tuple(found)


def test_no_kernel_approximates_or_contracts() -> None:
    names = list(triton_report.launches())
    assert [problem for what in names for one in compiled(what) for problem in one.problems()] == []
    divide = [what for what in names if any("div.rn.f32" in one.ptx for one in compiled(what))]
    assert {"attention", "rms_norm", "swiglu", "silu", "route", "adam", "entropy"} <= set(divide), "what is looked for would be there"
    assert not any(re.search(r"\b(?:ex2|lg2|tanh|sin|cos)\.", one.ptx) for what in names for one in compiled(what)), "exp and log are ours, everywhere"


def places() -> list[tuple[str, str]]:
    return [(name, words) for name, function in planted_kernels.functions().items() for words in planted_kernels.approximations(function)]


def test_every_function_that_divides_is_planted() -> None:
    assert {name for name, _ in places()} == set(LAUNCHES) and len(places()) >= 18


@pytest.mark.parametrize(("name", "words"), places())
def test_a_planted_approximation_is_refused(name: str, words: str) -> None:
    function = planted_kernels.functions()[name]
    with planted_kernels.planted(function, planted_kernels.approximations(function)[words]), triton_report.compiling() as found:
        triton_report.launches()[LAUNCHES[name]]()
    problems = [problem for one in found for problem in one.problems()]
    assert problems, f"{name}: a plain {words} goes unseen in {LAUNCHES[name]}"
    assert re.search(r"div\.full|sqrt\.approx", problems[0]) and "tl.div_rn, tl.sqrt_rn" in problems[0], problems


@triton.jit
def _of_libraries(x, y, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    if KIND == "exp":
        value = tl.exp(value)
    elif KIND == "log":
        value = tl.log(value)
    elif KIND == "rsqrt":
        value = tl.rsqrt(value)
    elif KIND == "toward zero":
        value = value.to(tl.bfloat16, fp_downcast_rounding="rtz").to(tl.float32)
    else:
        value = tl.div_rn(tl.sqrt_rn(value), value).to(tl.bfloat16).to(tl.float32)
    tl.store(y + at, value)


@pytest.mark.parametrize(
    ("kind", "named"), [("exp", "ex2.approx"), ("log", "fma.rn.ftz"), ("rsqrt", "rsqrt.approx"), ("toward zero", "cvt.rz"), ("ours", None)]
)
def test_functions_of_the_hardware_are_named(kind: str, named: str | None) -> None:
    x = torch.empty(128)
    with triton_report.compiling() as found:
        _of_libraries[(1,)](x, x, KIND=kind, BLOCK=128, **TWO_ROUNDINGS)
    assert (named is None and found[0].problems() == []) or (named is not None and named in found[0].problems()[0]), (kind, found[0].problems(), found[0].ptx)

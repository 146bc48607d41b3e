"""Kernel families stand side by side: the device chooses, a family needs no layer's help, and what it lacks is refused by name."""

import importlib
import os
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tio_megatron import kernels
from tio_megatron.contract import FAMILIES, Contract, Cuts, Layout
from tio_megatron.kernels import families, operands

ROOT = Path(__file__).resolve().parent.parent.parent

TOY = """
import torch
from tio_megatron.contract import Contract, VocabOrder
from tio_megatron.layers import attention, linear, norm, activation, router, vocab
from tio_megatron.testing import assert_same_bytes
import tests.support.toy_device as toy
toy.install()

torch.manual_seed(0)
def bf16(*shape): return torch.randn(*shape).bfloat16()
S, H, D = 6, 32, 16
given = dict(x=bf16(S, 1, H), g=torch.ones(H).bfloat16(), up=bf16(2 * H, H), down=bf16(H, H), gate=bf16(4, H), head=bf16(40, H))
given["target"] = torch.randint(0, 40, (S, 1))

def model(t):
    x = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in t.items()}
    h = norm.rms_norm(x["x"], x["g"], 1e-6)
    h = activation.swiglu(linear.column_parallel(h, x["up"], dgrad_leaves=2, gated=True))
    h = linear.row_parallel(h, x["down"], leaves=4)
    ids, probs = router.route_tokens(router.router_logits(h, x["gate"]), 2, normalise=True)
    shard = vocab.VocabShard(VocabOrder(40, 8), 40, 0, 1)
    scores = vocab.vocab_logprob(vocab.vocab_logits(h, x["head"], shard), x["target"], shard)
    loss = scores.sum() + probs.sum()
    grads = torch.autograd.grad(loss, [v for v in x.values() if v.is_floating_point()])
    return [scores.detach(), ids, *grads]
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    script = TOY + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd=ROOT)


def test_a_new_family_runs_every_layer_and_touches_none():
    """A device made in Python with a family of its own: layers forward and backward, the bytes of the CPU, by the family's kernels."""
    done = run("""
        toy.implement("rms_norm", "rms_norm_backward", "matmul", "swiglu", "swiglu_backward", "route", "route_backward", "vocab_max", "vocab_sumexp")
        toy.implement("gather_logprob", "logprob_backward", "tree_add", "exp", "log")
        on_toy = model({k: toy.Toy(v) for k, v in given.items()})
        for a, b in zip(model(given), on_toy, strict=True):
            assert isinstance(b, toy.Toy) and b.device.type == "toy"
            assert_same_bytes(a, b.held, "toy and cpu")
        assert set(toy.calls) >= {"rms_norm", "rms_norm_backward", "matmul", "swiglu_backward", "route_backward", "logprob_backward"}, toy.calls
        given["x"][0] += 1
        try:
            assert_same_bytes(on_toy[0].held, model(given)[0], "another input")
        except AssertionError:
            print("all of", sum(toy.calls.values()))
    """)
    assert done.returncode == 0 and "all of" in done.stdout, done.stderr[-3000:]


def test_what_a_family_lacks_is_refused_by_name():
    done = run("""
        from tio_megatron.kernels import swiglu, rope, adam, linear as product
        toy.implement("rms_norm", "matmul")
        t = toy.Toy(bf16(4, 32))
        for call in (lambda: swiglu.swiglu(t), lambda: norm.rms_norm(toy.Toy(torch.ones(4, 32)), toy.Toy(torch.ones(32)), 1e-6),
                     lambda: product.linear(t, bf16(8, 32), leaves=1), lambda: adam.adam_(t, t, t, t, None)):
            try:
                call()
            except ValueError as error:
                print(error)
    """)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "swiglu: gate_up is on toy:0; no kernel for that device; supported here is cpu; a contract of family toy brings more (kernels.load)",
        "rms_norm: x is torch.float32; use torch.bfloat16",
        "linear: no kernel for operands on toy:0 and cpu; both must be on one of: cpu, toy",
        "adam: weight is on toy:0; no kernel for that device; supported here is cpu; a contract of family toy brings more (kernels.load)",
    ]


def test_one_device_has_one_family_in_a_process():
    done = run("""
        toy.implement("exp")
        toy.implement("exp")
        from tio_megatron.kernels import families
        try:
            families.implement("exp", "toy", print, family="triton-sm90")
        except ValueError as error:
            print(error)
        assert families.devices("exp") == ("cpu", "toy") and families.devices("log") == ("cpu",)
    """)
    assert done.stdout.strip() == "tio::exp: device toy has the kernels of family 'toy' in this process; 'triton-sm90' needs another process", done.stderr


def test_every_operator_is_in_the_table_under_the_names_that_checks_use():
    for folder in pkgutil.iter_modules(kernels.__path__):
        if folder.ispkg:
            importlib.import_module(f"tio_megatron.kernels.{folder.name}")
    for what in ("rms_norm", "rope_backward", "adam", "value", "matmul", "grouped", "router_scores", "attention_paged"):
        assert families.devices(what)[:1] == ("cpu",) and families.serves(what, "meta") and not families.serves(what, "xpu")
    with pytest.raises(ValueError, match="nonsense: x is on .*supported here is none"):
        operands.check_device("nonsense", "x", _Elsewhere())


def test_the_contract_follows_its_family():
    ours = Contract(family="triton-sm90")
    assert (ours.kv_block, ours.chain, ours.cuts.expert_row, ours.cuts.attn_row, ours.cuts.mlp_row) == (64, 0, 1, 4, 8)
    assert Contract.from_json(ours.to_json()) == ours == Contract.from_json('{"family": "triton-sm90"}')
    assert Contract.from_json('{"family": "triton-sm90", "cuts": {"vocab": 4}}').cuts == Cuts(attn_row=4, expert_row=1, vocab=4)
    assert Contract.for_layouts(Layout(tp=2, etp=2), family="triton-sm90").cuts == Cuts.uniform(2)
    assert ours.fingerprint() != Contract(cuts=ours.cuts).fingerprint()
    assert Contract().cuts == Cuts() and Contract(cuts=Cuts()) == Contract()


def test_versions_and_unknown_families():
    assert kernels.version() == kernels.version("cpu")
    for ask in (kernels.version, kernels.load):
        with pytest.raises(ValueError, match="unknown kernel family 'abacus'; known are .*'cpu'"):
            ask("abacus")
    kernels.load("cpu")


def test_families_state_their_order():
    for name, family in FAMILIES.items():
        assert set(family.fields) == {"kv_block", "chain", "row_chain", "router_chain"} and "product" in family.order, name
        assert set(family.operands) <= {"bfloat16", "float32"} and all(hasattr(torch, operand) for operand in family.operands)
        assert ("float32" in family.operands) == (name == "cpu"), "accelerators take bf16 operands alone"


class _Elsewhere:
    is_cpu = False
    device = torch.device("xpu")

"""The contract as an object: validated, exchanged, compared; and what it says of a layout that does not fit."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tio_megatron.contract import Contract, Cuts, Layout, ModelShape
from tio_megatron.models import shape_from_hf

COUNTS = st.sampled_from([1, 2, 4, 8, 16])
CONTRACTS = st.builds(
    Contract,
    cuts=st.builds(Cuts, attn_row=COUNTS, mlp_row=COUNTS, expert_row=COUNTS, col_dgrad=COUNTS, expert_col_dgrad=COUNTS, vocab=COUNTS),
    grain=st.integers(1, 4096),
)
SIZES = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(Layout, tp=SIZES, ep=st.sampled_from([1, 2, 3, 4]), etp=st.one_of(st.none(), SIZES))
MOE = ModelShape(layers=4, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=768)
DENSE = ModelShape(layers=4, hidden=1024, heads=16, kv_heads=8, head_dim=128, vocab=151936, ffn=3072)


@given(CONTRACTS, CONTRACTS)
def test_fingerprints_differ_exactly_when_a_field_does(a, b):
    assert (a.fingerprint() == b.fingerprint()) == (a == b) == (not a.differences(b))


@given(CONTRACTS)
def test_json_is_an_inverse(contract):
    again = Contract.from_json(contract.to_json())
    assert again == contract and again.fingerprint("k") == contract.fingerprint("k") and "\n" not in contract.to_json()


def test_the_fingerprint_is_stable_and_holds_the_kernels():
    """These digits change only together with a rule: raise VERSION then."""
    assert Contract().fingerprint() == "4bb17879a59a730e"
    assert Contract().fingerprint("cpu-1") not in (Contract().fingerprint("cpu-2"), Contract().fingerprint())


def test_differences_name_the_fields():
    ours, theirs = Contract(), Contract(cuts=Cuts(attn_row=4), grain=128)
    assert ours.differences(theirs) == ["grain: 512 / 128", "cuts.attn_row: 8 / 4"]


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Contract().grain = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"order": 1}', "unknown field order"),
        ('{"b": 1, "a": 2}', "unknown field a, b"),
        ('{"cuts": 8}', "cuts must be a JSON object"),
        ('{"cuts": {"row": 8}}', "unknown cut row"),
        ('{"cuts": {"attn_row": 3}}', "cuts.attn_row must be a power of two, got 3"),
        ('{"cuts": {"attn_row": 0}}', "power of two"),
        ('{"cuts": {"attn_row": "8"}}', "power of two, got '8'"),
        ('{"cuts": {"attn_row": 8.0}}', "power of two, got 8.0"),
        ('{"cuts": {"attn_row": true}}', "power of two, got True"),
        ('{"version": 1}', "version 1 is not the version of this package, 2"),
        ('{"version": 1.0}', "version must be a whole number, got 1.0"),
        ('{"version": true}', "version must be a whole number, got True"),
        ('{"family": "triton-sm70"}', "unknown kernel family 'triton-sm70'; known are ['cpu', "),
        ('{"family": "triton-sm90", "chain": 256}', "family 'triton-sm90' has chain 0, got 256"),
        ('{"family": ["cpu"]}', "family must be a name"),
        ('{"chain": 128}', "family 'cpu' has chain 256, got 128"),
        ('{"chain": 256.0}', "chain must be a whole number"),
        ('{"row_chain": 32.0}', "row_chain must be a whole number"),
        ('{"router_chain": true}', "router_chain must be a whole number"),
        ('{"kv_block": 512}', "family 'cpu' has kv_block 64, got 512"),
        ('{"vocab_block": 64}', "vocab_block must be 128, got 64"),
        ('{"grain": 0}', "grain must be positive, got 0"),
        ('{"grain": "512"}', "grain must be a whole number, got '512'"),
        ('{"grain": null}', "grain must be a whole number, got None"),
    ],
)
def test_from_json_refuses(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Contract.from_json(text)


def test_from_json_fills_in_defaults():
    assert Contract.from_json("{}") == Contract()
    assert Contract.from_json(json.dumps({"cuts": {"vocab": 4}})).cuts == Cuts(vocab=4)


@given(st.lists(LAYOUTS, min_size=1, max_size=4), st.data())
def test_for_layouts_serves_them_all_with_the_fewest_leaves(layouts, data):
    contract = Contract.for_layouts(*layouts)
    assert contract == Contract.for_layouts(*data.draw(st.permutations(layouts)))
    length = 16 * 3
    for layout in layouts:
        for axis, parts in (
            ("attn_row", layout.tp),
            ("mlp_row", layout.tp),
            ("vocab", layout.tp),
            ("expert_row", layout.expert_tp),
            ("expert_col_dgrad", layout.expert_tp),
        ):
            assert contract.leaves_of(axis, length, parts, "here") * parts == getattr(contract.cuts, axis)
    most = {"attn_row": max(layout.tp for layout in layouts), "expert_row": max(layout.expert_tp for layout in layouts)}
    for axis, parts in most.items():
        assert getattr(contract.cuts, axis) < 2 * parts, "half as many leaves would not do"


def test_for_layouts_of_the_main_job():
    contract = Contract.for_layouts(Layout(tp=2, ep=2, etp=1), Layout.for_vllm(tp=4))
    assert contract.cuts == Cuts(attn_row=4, mlp_row=4, expert_row=4, col_dgrad=4, expert_col_dgrad=4, vocab=4)
    contract = Contract.for_layouts(Layout(tp=2, ep=2, etp=1), Layout.for_vllm(tp=4, expert_parallel=True))
    assert contract.cuts.expert_row == 1
    with pytest.raises(ValueError, match="at least one layout"):
        Contract.for_layouts()


@given(st.integers(1, 600), COUNTS, st.integers(1, 20))
def test_what_a_refusal_suggests_would_work(length, leaves, parts):
    contract = Contract(cuts=Cuts(mlp_row=leaves))
    try:
        assert contract.leaves_of("mlp_row", length, parts, "mlp.down") == leaves // parts and length % leaves == 0
        return
    except ValueError as error:
        text = str(error)
    assert text.startswith("mlp.down: ") and (str(length) in text or str(parts) in text) and f"cuts.mlp_row = {leaves}" in text
    tried = 0
    for counts in re.findall(r"cuts.mlp_row in \[([\d, ]+)\] would work", text):
        for count in map(int, counts.split(",")):
            tried += bool(Contract(cuts=Cuts(mlp_row=count)).leaves_of("mlp_row", length, parts, ""))
    for count, sizes in re.findall(r"cuts.mlp_row = (\d+) with \[([\d, ]+)\] parts would work", text):
        for size in map(int, sizes.split(",")):
            tried += bool(Contract(cuts=Cuts(mlp_row=int(count))).leaves_of("mlp_row", length, size, ""))
    for sizes in re.findall(r"sizes \[([\d, ]+)\] would work", text):
        for size in map(int, sizes.split(",")):
            tried += bool(contract.leaves_of("mlp_row", length, size, ""))
    for count in re.findall(r", or cuts.mlp_row = (\d+)$", text):
        tried += bool(Contract(cuts=Cuts(mlp_row=int(count))).leaves_of("mlp_row", length, parts, ""))
    assert tried, text


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2), Layout(tp=4, sp=True), Layout(tp=8), Layout(tp=4, ep=4, etp=1), Layout(pp=2), Layout(tp=2, ep=8, etp=2)]
)
def test_layouts_of_the_true_model_fit(layout):
    Contract().check(layout, MOE)
    if layout.ep == 1:
        Contract().check(layout, DENSE)


def test_check_lists_every_problem_at_once():
    with pytest.raises(ValueError) as caught:
        Contract().check(Layout(tp=3, ep=5, etp=3, pp=3), MOE)
    lines = str(caught.value).splitlines()
    assert lines[0] == "layout TP 3 EP 5 PP 3 does not fit the contract:"
    for words in (
        "attention: 32 query heads do not divide by tp 3; tp in [1, 2, 4, 8] would work",
        "attention.output: cut into 3 parts, but cuts.attn_row = 8 leaves; tp in [1, 2, 4, 8] would work",
        "experts.down: cut into 3 parts, but cuts.expert_row = 8 leaves; etp in [1, 2, 4, 8] would work",
        "experts: 128 experts do not divide by ep 5; ep in [1, 2, 4, 8, 16, 32, 64] would work",
        "vocabulary: cut into 3 parts, but cuts.vocab = 8 runs; tp in [1, 2, 4, 8] would work",
        "pipeline: 4 layers do not divide by pp 3; pp in [1, 2, 4] would work",
    ):
        assert f"  {words}" in lines


def test_check_names_leaves_that_do_not_divide():
    odd = dataclasses.replace(DENSE, ffn=3076)
    with pytest.raises(ValueError, match=re.escape("mlp.down: 3076 terms do not divide into cuts.mlp_row = 8 equal leaves; cuts.mlp_row in [2, 4] would work")):
        Contract().check(Layout(tp=2), odd)
    with pytest.raises(ValueError, match="ep 2 on a dense model"):
        Contract().check(Layout(ep=2), DENSE)
    with pytest.raises(ValueError, match="4 key/value heads and tp 6: neither divides the other"):
        Contract().check(Layout(tp=6), dataclasses.replace(MOE, heads=24))
    with pytest.raises(ValueError, match="no cuts on an axis 'hidden'"):
        Contract().leaves_of("hidden", 8, 1, "here")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Layout(tp=0), "tp must be at least 1"),
        (lambda: Layout(etp=0), "etp must be at least 1"),
        (lambda: Layout(tp="2"), "layout: tp must be a whole number, got '2'"),
        (lambda: Layout(tp=True), "layout: tp must be a whole number, got True"),
        (lambda: Layout(etp=2.0), "layout: etp must be a whole number, got 2.0"),
        (lambda: Layout(tp=2, sp=1), "layout: sp must be True or False, got 1"),
        (lambda: Layout.for_vllm(tp="2", dp=2), "layout: tp must be a whole number, got '2'"),
        (lambda: Layout.for_vllm(expert_parallel="no"), "expert_parallel must be True or False, got 'no'"),
        (lambda: Layout(sp=True), "needs tp of at least 2"),
        (lambda: dataclasses.replace(MOE, top_k=129), "top_k 129 must be between 1 and the number of experts 128"),
        (lambda: dataclasses.replace(MOE, kv_heads=5), "32 query heads are not a multiple of 5"),
        (lambda: dataclasses.replace(DENSE, ffn=0), "a dense model needs ffn"),
        (lambda: shape_from_hf({"architectures": ["LlamaForCausalLM"]}), "supported are"),
        (lambda: shape_from_hf({"architectures": ["Qwen3ForCausalLM"]}), "missing num_hidden_layers"),
    ],
)
def test_layouts_and_models_that_are_none(call, words):
    with pytest.raises(ValueError, match=words):
        call()

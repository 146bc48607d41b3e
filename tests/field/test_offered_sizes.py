"""What a refusal of a layout offers would work: each value that it names, tried, is accepted; and no contract is promised that serves nobody."""

import dataclasses
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tio_megatron.contract import Contract, Cuts, Layout, ModelShape
from tio_megatron.verify.doctor import fit

COUNTS = st.sampled_from([1, 2, 4, 8, 16])
FIELDS = [field.name for field in dataclasses.fields(Cuts)]
CUTS = st.fixed_dictionaries({name: COUNTS for name in FIELDS})
SIZES = st.integers(1, 12)
LAYOUTS = st.builds(Layout, tp=SIZES, ep=SIZES, etp=st.one_of(st.none(), SIZES), pp=st.integers(1, 4))
ROLLOUTS = st.builds(Layout.for_vllm, SIZES, st.booleans())
THREE_GROUPS = ModelShape(layers=2, hidden=96, heads=6, kv_heads=3, head_dim=16, vocab=700, experts=12, top_k=2, moe_ffn=96)


@st.composite
def models(draw):
    kv_heads = draw(st.integers(1, 12))
    experts = draw(st.sampled_from([0, 4, 6, 12]))
    return ModelShape(
        layers=draw(st.integers(1, 6)),
        hidden=64,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4, 16])),
        vocab=700,
        ffn=draw(st.integers(1, 24)) * 2,
        experts=experts,
        top_k=2 if experts else 0,
        moe_ffn=draw(st.integers(1, 24)) * 2 if experts else 0,
    )


def changed(layout, size, value, serving):
    if serving and size == "tp":  # vLLM's own rule
        return Layout.for_vllm(value, expert_parallel=layout.ep > 1)
    return dataclasses.replace(layout, **{size: value})


def values(text):
    return [int(one) for one in text.strip("[]").split(", ")]


NUMBERS = r"(?:in )?(\[[\d, ]+\]|\d+)"


def tried(works, contract, layout, serving):
    """Each (contract, layout) that the words of a problem offer."""
    if found := re.fullmatch(rf"cuts\.(\w+) = (\d+) with (\w+) {NUMBERS} would work", works):
        cut, count, size, offered = found.groups()
        cuts = dataclasses.replace(contract.cuts, **{cut: int(count)})
        return [(dataclasses.replace(contract, cuts=cuts), changed(layout, size, value, serving)) for value in values(offered)]
    if found := re.fullmatch(rf"cuts\.(\w+) {NUMBERS} would work", works):
        cut, offered = found.groups()
        return [(dataclasses.replace(contract, cuts=dataclasses.replace(contract.cuts, **{cut: count})), layout) for count in values(offered)]
    found = re.fullmatch(rf"(tp|etp|ep|pp) {NUMBERS} would work(?:, or cuts\.(\w+) = (\d+))?", works)
    assert found, works
    size, offered, cut, count = found.groups()
    more = [(dataclasses.replace(contract, cuts=dataclasses.replace(contract.cuts, **{cut: int(count)})), layout)] if cut else []
    return [(contract, changed(layout, size, value, serving)) for value in values(offered)] + more


@settings(deadline=None)
@given(CUTS, models(), st.one_of(st.tuples(LAYOUTS, st.just(False)), st.tuples(ROLLOUTS, st.just(True))))
@example(dict.fromkeys(FIELDS, 8), THREE_GROUPS, (Layout(tp=3), False))
@example(dict.fromkeys(FIELDS, 8), THREE_GROUPS, (Layout.for_vllm(3), True))
def test_each_offered_value_is_accepted(cuts, model, side):
    layout, serving = side
    contract = Contract(cuts=Cuts(**cuts))
    before = list(contract.problems(layout, model, serving=serving))
    for problem in before:
        choices = tried(problem.works, contract, layout, serving)
        assert choices
        for other, moved in choices:
            left = list(other.problems(moved, model, serving=serving))
            assert problem.where not in {one.where for one in left}, (str(problem), moved, other.cuts)
            assert len(left) < len(before), "nothing else breaks"


@settings(deadline=None)
@given(CUTS, models(), st.one_of(st.tuples(LAYOUTS, st.just(False)), st.tuples(ROLLOUTS, st.just(True))), st.randoms())
def test_whoever_takes_what_is_offered_arrives(cuts, model, side, random):
    layout, serving = side
    contract = Contract(cuts=Cuts(**cuts))
    for _ in range(20):
        found = list(contract.problems(layout, model, serving=serving))
        if not found:
            return
        contract, layout = random.choice(tried(random.choice(found).works, contract, layout, serving))
    raise AssertionError((layout, [str(one) for one in found]))


def test_three_key_value_heads_leave_one_rank():
    found = [str(problem) for problem in Contract().problems(Layout(tp=3), THREE_GROUPS)]
    assert found and all(line.endswith("; tp 1 would work") for line in found)
    assert any("attention.output: cut into 3 parts" in line for line in found)


@pytest.mark.parametrize("layout", [Layout(tp=3), Layout(tp=2, etp=3), Layout.for_vllm(6), Layout.for_vllm(3, expert_parallel=True)], ids=str)
def test_no_cuts_are_promised_for_sizes_that_no_leaves_serve(layout):
    with pytest.raises(ValueError, match=f"no cuts serve {layout}: leaves are powers of two"):
        Contract.for_layouts(Layout(tp=2), layout)


@given(st.lists(LAYOUTS, min_size=1, max_size=3))
def test_a_contract_for_layouts_serves_each(layouts):
    model = ModelShape(layers=12, hidden=64, heads=64, kv_heads=64, head_dim=16, vocab=700, experts=27720, top_k=2, moe_ffn=64)
    try:
        contract = Contract.for_layouts(*layouts)
    except ValueError:
        return
    assert not any(problem for layout in layouts for problem in contract.problems(layout, model))


def test_the_plan_names_what_is_left():
    found = fit(THREE_GROUPS, Layout(tp=3), Layout.for_vllm(1), training=False)
    assert found.nearest and all(near.tp == 1 for near, _ in found.nearest)
    bad = fit(dataclasses.replace(THREE_GROUPS, heads=12), Layout(tp=6, sp=True), Layout.for_vllm(1))
    (line,) = [finding.works for finding in bad.findings if "is above the 3 key/value heads" in finding.what]
    assert line == "tp 1 would work"

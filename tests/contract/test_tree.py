"""The tree: any split into any number of ranks gives the root's bytes, and the walk without recursion is the tree."""

from __future__ import annotations

import operator
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tio_megatron.contract import Node, ReductionTree
from tio_megatron.contract.tree import ABSENT, next_power_of_two

TERM = st.one_of(
    st.sampled_from([1e20, -1e20, 1.0, -1.0, 0.0, -0.0, 1e-20, 3.0, float("inf"), -float("inf")]),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
)
TERMS = st.lists(TERM, min_size=1, max_size=40)


def pair(a: str, b: str) -> str:
    return f"({a}+{b})"


def by_recursion(lo: int, width: int, leaves: int) -> str:
    """The definition, in words: halves of the next power of two, absent halves skipped."""
    if width == 1:
        return str(lo)
    left = by_recursion(lo, width // 2, leaves)
    return left if lo + width // 2 >= leaves else pair(left, by_recursion(lo + width // 2, width // 2, leaves))


def as_bytes(x: float) -> bytes:
    return b"nan" if x != x else struct.pack("<d", x)


def cut(draw, leaves: int) -> list[int]:
    """Bounds of some ranks' runs; some ranks have none."""
    return [0, *sorted(draw(st.lists(st.integers(0, leaves), max_size=8))), leaves]


@pytest.mark.parametrize("leaves", [*range(1, 34), 64, 100, 128])
def test_the_walk_is_the_definition(leaves):
    assert str(ReductionTree(leaves)) == by_recursion(0, next_power_of_two(leaves), leaves)


def test_a_few_trees_in_words():
    assert [str(ReductionTree(n)) for n in (1, 2, 3, 4)] == ["0", "(0+1)", "((0+1)+2)", "((0+1)+(2+3))"]
    assert str(ReductionTree(7)) == "(((0+1)+(2+3))+((4+5)+6))"


@given(TERMS, st.data())
def test_any_split_gives_the_roots_bytes(terms, data):
    tree = ReductionTree(len(terms))
    bounds = cut(data.draw, len(terms))
    parts = [tree.partial(lo, terms[lo:hi]) for lo, hi in zip(bounds, bounds[1:], strict=False)]
    parts = data.draw(st.permutations(parts))
    assert as_bytes(tree.combine(parts)) == as_bytes(tree.reduce(terms))


@given(st.integers(1, 70), st.data())
def test_any_split_writes_the_roots_words(leaves, data):
    tree = ReductionTree(leaves)
    bounds = cut(data.draw, leaves)
    parts = [tree.partial(lo, [str(i) for i in range(lo, hi)], pair) for lo, hi in zip(bounds, bounds[1:], strict=False)]
    assert tree.combine(parts, pair) == str(tree)


@given(TERMS)
def test_absent_leaves_may_be_filled(terms):
    """A backend may pad to a power of two with -0, never with +0."""
    tree = ReductionTree(len(terms))
    padded = terms + [ABSENT] * (tree.width - len(terms))
    assert as_bytes(ReductionTree(tree.width).reduce(padded)) == as_bytes(tree.reduce(terms))


def test_plus_zero_is_not_absent():
    assert as_bytes(ReductionTree(4).reduce([-0.0, -0.0, -0.0, 0.0])) != as_bytes(ReductionTree(3).reduce([-0.0, -0.0, -0.0]))


@given(st.integers(1, 300), st.data())
def test_a_frontier_is_the_fewest_nodes_that_cover_the_range(leaves, data):
    tree = ReductionTree(leaves)
    lo = data.draw(st.integers(0, leaves))
    hi = data.draw(st.integers(lo, leaves))
    nodes = tree.frontier(lo, hi)
    covered = [leaf for node in nodes for leaf in range(node.start, node.stop)]
    assert [leaf for leaf in covered if leaf < leaves] == list(range(lo, hi))
    assert covered == sorted(set(covered)) and all(leaf >= leaves for leaf in covered[hi - lo :])
    assert all(node.start < leaves and node.stop <= tree.width for node in nodes)
    for node in nodes:  # maximal: a parent would hold a leaf of somebody else
        if node != tree.root:
            parent = node.parent
            assert any(leaf < lo or (leaf >= hi and leaf < leaves) for leaf in range(parent.start, parent.stop))


@pytest.mark.parametrize("leaves", [8, 16, 64])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_equal_runs_are_one_node_each(leaves, parts):
    tree = ReductionTree(leaves)
    assert [len(tree.frontier(lo, hi)) for lo, hi in tree.split(parts)] == [1] * parts


def test_the_last_of_equal_runs_is_one_node_too():
    tree = ReductionTree(12)
    assert [[str(n) for n in tree.frontier(lo, hi)] for lo, hi in tree.split(3)] == [["0:4"], ["4:8"], ["8:16"]]


def test_other_orders_give_other_bytes():
    """Negative controls: the order matters, so the tests above can fail."""
    terms = [1e20, 1.0, -1e20, 1.0]
    tree = ReductionTree(4)
    assert tree.reduce(terms) == 0.0 and sum(terms) == 1.0
    assert tree.reduce([terms[i] for i in (1, 2, 3, 0)]) != tree.reduce([terms[i] for i in (0, 2, 1, 3)])
    halves = [tree.partial(0, terms[:3]), tree.partial(3, terms[3:])]
    assert tree.combine(halves) == 0.0 and sum(terms[:3]) + terms[3] != 0.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ReductionTree(0), "at least one leaf"),
        (lambda: ReductionTree(4).reduce([1.0]), "4 leaves, got 1 values"),
        (lambda: ReductionTree(4).frontier(1, 5), r"leaves \[1, 5\) are not inside a tree of 4"),
        (lambda: ReductionTree(4).frontier(3, 2), "not inside"),
        (lambda: ReductionTree(12).split(5), r"12 leaves cannot be cut into 5 equal runs; these counts work: \[1, 2, 3, 4, 6, 12\]"),
        (lambda: ReductionTree(12).split(0), "cannot be cut"),
        (lambda: ReductionTree(4).combine([{Node(0, 2): 1.0}]), r"leaves \[2, 4\) were sent by no rank"),
        (lambda: ReductionTree(4).combine([{Node(0, 2): 1.0}, {Node(0, 2): 1.0}]), "leaves 0:2 were sent twice"),
        (lambda: ReductionTree(4).combine([{Node(0, 4): 1.0}, {Node(1, 1): 1.0}]), "or twice"),
        (lambda: ReductionTree(4).combine([{Node(1, 1): 1.0}, {Node(2, 2): 1.0}]), r"leaves \[0, 1\)"),
        (lambda: ReductionTree(4).combine([]), r"leaves \[0, 4\)"),
        (lambda: Node(1, 2), "no node of the tree"),
        (lambda: Node(0, 3), "no node of the tree"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(st.integers(1, 200))
def test_merges_need_no_deep_stack(leaves):
    """What a kernel must hold: one value per level."""
    depth = deepest = 0
    for merges in ReductionTree(leaves).merges():
        depth += 1
        deepest = max(deepest, depth)
        depth -= merges
        assert depth >= 1
    assert depth == 1 and deepest <= next_power_of_two(leaves).bit_length()


def test_reduce_takes_anything_that_adds():
    assert ReductionTree(3).reduce(["a", "b", "c"], operator.concat) == "abc"

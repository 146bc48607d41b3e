"""The balanced binary tree that every sum obeys.

A sum of ``n`` terms is the balanced binary tree on the next power of two, with the leaves from ``n`` on absent. An absent
node is skipped: adding ``+0`` for it would turn a ``-0`` into ``+0``. Adding ``-0`` *is* skipping, since ``x + (-0) == x`` for
every ``x`` including both zeros, so backends may fill absent places with :data:`ABSENT`.

A rank that holds the leaves ``[lo, hi)`` computes its *frontier*: the maximal aligned power-of-two nodes in that range. Joining
the frontiers of any split gives the bytes one rank with all leaves would get.

>>> tree = ReductionTree(5)
>>> print(tree)
(((0+1)+(2+3))+4)
>>> [str(node) for node in tree.frontier(1, 5)]
['1', '2:4', '4:8']
>>> values = [1e20, 1.0, -1e20, 1.0, 7.0]
>>> whole = tree.reduce(values)
>>> parts = [tree.partial(lo, values[lo:hi]) for lo, hi in ((0, 1), (1, 4), (4, 5))]
>>> tree.combine(parts) == whole
True
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")
ABSENT = -0.0
"""The identity of floating-point addition in round-to-nearest: what an absent node may be filled with."""


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for ``n`` at most 1).

    >>> [next_power_of_two(n) for n in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << max(0, n - 1).bit_length()


def is_power_of_two(n: int) -> bool:
    """Whether ``n`` is 1, 2, 4, 8, ..."""
    return n > 0 and n & (n - 1) == 0


@dataclass(frozen=True, order=True)
class Node:
    """An aligned node of the tree: the leaves ``[start, start + size)``, with ``size`` a power of two that divides ``start``."""

    start: int
    size: int

    def __post_init__(self) -> None:
        if not is_power_of_two(self.size) or self.start % self.size or self.start < 0:
            raise ValueError(f"no node of the tree: start {self.start}, size {self.size} (size must be a power of two that divides start)")

    @property
    def stop(self) -> int:
        """One past the last leaf."""
        return self.start + self.size

    @property
    def parent(self) -> Node:
        """The node of twice the size that holds this one."""
        return Node(self.start - self.start % (2 * self.size), 2 * self.size)

    def __str__(self) -> str:
        return str(self.start) if self.size == 1 else f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class ReductionTree:
    """The tree over ``leaves`` terms; ``leaves`` need not be a power of two.

    Raises:
        ValueError: ``leaves`` is less than 1.
    """

    leaves: int

    def __post_init__(self) -> None:
        if self.leaves < 1:
            raise ValueError(f"a tree needs at least one leaf, got {self.leaves}")

    @property
    def width(self) -> int:
        """Leaves of the full tree, absent ones counted."""
        return next_power_of_two(self.leaves)

    @property
    def root(self) -> Node:
        """The node that holds every leaf."""
        return Node(0, self.width)

    def frontier(self, lo: int, hi: int) -> tuple[Node, ...]:
        """The maximal aligned nodes inside the leaves ``[lo, hi)``, ascending. Empty for an empty range.

        A range that reaches the last leaf also owns the absent leaves behind it, so the last of several equal runs is one
        node whenever the others are. A node without any present leaf is left out.

        Raises:
            ValueError: the range is not inside the tree.

        >>> [str(node) for node in ReductionTree(8).frontier(2, 8)]
        ['2:4', '4:8']
        >>> [str(node) for node in ReductionTree(6).frontier(4, 6)]
        ['4:8']
        >>> [str(node) for node in ReductionTree(6).frontier(5, 6)]
        ['5']
        """
        if not 0 <= lo <= hi <= self.leaves:
            raise ValueError(f"leaves [{lo}, {hi}) are not inside a tree of {self.leaves}")
        if lo == hi:
            return ()
        stop = self.width if hi == self.leaves else hi
        nodes = []
        while lo < min(stop, self.leaves):
            size = lo & -lo if lo else self.width
            while lo + size > stop:
                size >>= 1
            nodes.append(Node(lo, size))
            lo += size
        return tuple(nodes)

    def split(self, parts: int) -> tuple[tuple[int, int], ...]:
        """``parts`` equal runs of leaves.

        Raises:
            ValueError: ``parts`` does not divide the number of leaves; names the counts that do.
        """
        if parts < 1 or self.leaves % parts:
            works = [p for p in range(1, self.leaves + 1) if self.leaves % p == 0]
            raise ValueError(f"{self.leaves} leaves cannot be cut into {parts} equal runs; these counts work: {works}")
        run = self.leaves // parts
        return tuple((i * run, (i + 1) * run) for i in range(parts))

    def merges(self) -> tuple[int, ...]:
        """How many times the stack's top is folded after each leaf, for a kernel that walks leaves in ascending order.

        The walk: push leaf ``i``, then ``merges()[i]`` times replace the two topmost values ``a, b`` by ``a + b``. One value is
        left at the end. This is how every kernel obeys the tree without recursion.

        >>> ReductionTree(6).merges()
        (0, 1, 0, 2, 0, 2)
        """
        counts = []
        for leaf in range(self.leaves):
            done = leaf + 1
            counts.append((done & -done).bit_length() - 1)
        counts[-1] = bin(self.leaves - 1).count("1")
        return tuple(counts)

    def reduce(self, values: Sequence[Value], add: Callable[[Value, Value], Value] = operator.add) -> Value:
        """The sum of all leaves in the tree's order. ``add`` defaults to ``+``.

        Raises:
            ValueError: the number of values is not the number of leaves.
        """
        if len(values) != self.leaves:
            raise ValueError(f"the tree has {self.leaves} leaves, got {len(values)} values")
        stack: list[Value] = []
        for value, merges in zip(values, self.merges(), strict=True):
            stack.append(value)
            for _ in range(merges):
                right = stack.pop()
                stack.append(add(stack.pop(), right))
        return stack[0]

    def partial(self, lo: int, values: Sequence[Value], add: Callable[[Value, Value], Value] = operator.add) -> dict[Node, Value]:
        """The frontier's values of the rank that holds the leaves from ``lo`` on: what it sends."""
        nodes = self.frontier(lo, lo + len(values))
        held = {Node(lo + i, 1): value for i, value in enumerate(values)}
        return {node: _climb(node, held, self.leaves, add) for node in nodes}

    def combine(self, partials: Iterable[Mapping[Node, Value]], add: Callable[[Value, Value], Value] = operator.add) -> Value:
        """The root from the frontiers of all ranks, in any order of ranks.

        Raises:
            ValueError: two ranks send overlapping nodes, or leaves are missing.
        """
        held: dict[Node, Value] = {}
        for partial in partials:
            for node, value in partial.items():
                if node in held:
                    raise ValueError(f"leaves {node} were sent twice")
                held[node] = value
        covered = 0
        for node in sorted(held):
            if node.start != covered:
                raise ValueError(f"leaves [{covered}, {node.start}) were sent by no rank or twice")
            covered = node.stop
        if covered < self.leaves:
            raise ValueError(f"leaves [{covered}, {self.leaves}) were sent by no rank")
        return _climb(self.root, held, self.leaves, add)

    def __str__(self) -> str:
        return self.reduce([str(i) for i in range(self.leaves)], lambda a, b: f"({a}+{b})")


def _climb(node: Node, held: Mapping[Node, Value], leaves: int, add: Callable[[Value, Value], Value]) -> Value:
    if node in held:
        return held[node]
    half = node.size // 2
    left = _climb(Node(node.start, half), held, leaves, add)
    if node.start + half >= leaves:
        return left
    return add(left, _climb(Node(node.start + half, half), held, leaves, add))

"""What each rank sends, receives and adds, round by round: the three schedules as data, without tensors.

A plan moves *nodes* of the tree. A rank starts with the values of its own nodes; whenever it holds two sibling nodes it adds them, the
lower on the left; a node whose sibling is absent is its parent. So every schedule adds the same pairs, and all give the same bytes.

The elements are cut in *pieces*, one per rank (``doubling`` does not cut). Piece ``p`` is complete at rank ``p``.

A *place* is where a node's value lies: ``0, 1, ...`` a scratch slot of one piece, :data:`OUT` the result, :func:`given` a row of the input
(read only).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tio_megatron.contract import Node, ReductionTree
from tio_megatron.contract.tree import is_power_of_two

OUT = -1

SCHEDULES = ("doubling", "scatter", "ring")

Owned = tuple[tuple[Node, ...], ...]
"""The nodes each rank starts with, by rank."""


def given(row: int) -> int:
    """The place of row ``row`` of the input."""
    return -2 - row


@dataclass(frozen=True)
class Round:
    """One exchange of ``sends`` and ``recvs``, each (peer, piece, place); then ``adds`` of (piece, left, right, sum); then ``copies``,
    each (piece, place), to OUT.

    ``how`` they travel: ``swap`` (one all-to-all of all ranks), ``links`` (only between the ranks named), or empty for none.
    """

    how: str = ""
    sends: tuple[tuple[int, int, int], ...] = ()
    recvs: tuple[tuple[int, int, int], ...] = ()
    adds: tuple[tuple[int, int, int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """All rounds of one rank. ``slots`` scratch slots of one piece each; ``cut`` says whether elements are cut in one piece per rank."""

    rank: int
    rounds: tuple[Round, ...]
    slots: int
    cut: bool

    @property
    def hops(self) -> int:
        """Rounds in which bytes travel."""
        return sum(bool(r.how) for r in self.rounds)

    def sent(self, lengths: Sequence[int], root_bytes: int) -> int:
        """Bytes this rank sends to others for pieces of ``lengths`` elements: 4 each, but ``root_bytes`` for an element of a finished piece."""
        sends = [send for r in self.rounds for send in r.sends if send[0] != self.rank]
        return sum(lengths[piece] * (root_bytes if place == OUT else 4) for _, piece, place in sends)

    def scratch(self, lengths: Sequence[int], root_bytes: int) -> int:
        """Bytes held during the call besides the result: slots, and what a round sends to several ranks, which is packed."""
        packed = 0
        for r in self.rounds:
            if r.how == "swap" and len({send[1:] for send in r.sends}) < len(r.sends):
                packed = max(packed, sum(lengths[piece] * (root_bytes if place == OUT else 4) for _, piece, place in r.sends))
        return self.slots * max(lengths) * 4 + packed


def folded(nodes: Iterable[Node], leaves: int) -> tuple[Node, ...]:
    """``nodes`` after every pair of siblings has become its parent, ascending."""
    stack: list[Node] = []
    root = ReductionTree(leaves).root
    for node in sorted(nodes):
        stack.append(_promote(node, leaves, root))
        while len(stack) > 1 and _siblings(stack[-2], stack[-1]):
            right = stack.pop()
            stack[-1] = _promote(stack[-1].parent, leaves, root)
            assert right.stop <= stack[-1].stop
    return tuple(stack)


def _promote(node: Node, leaves: int, root: Node) -> Node:
    """The largest node with the same present leaves: siblings behind the last leaf are absent and add nothing."""
    while node.size < root.size and node.stop >= leaves and node.start % (2 * node.size) == 0:
        node = node.parent
    return node


def _siblings(left: Node, right: Node) -> bool:
    return left.size == right.size and left.stop == right.start and left.start % (2 * left.size) == 0


@lru_cache(maxsize=64)
def rank_order(size: int) -> Owned:
    """One leaf per rank: the plain all-reduce over ``size`` ranks."""
    return tuple((Node(rank, 1),) for rank in range(size))


@lru_cache(maxsize=1024)
def check_owned(owned: Owned, leaves: int) -> None:
    """Refuse nodes that overlap, that hold no leaf, or that leave a leaf out.

    Raises:
        ValueError: names the leaves.
    """
    for rank, nodes in enumerate(owned):
        absent = [str(node) for node in nodes if node.start >= leaves]
        if absent:
            raise ValueError(f"rank {rank} holds {', '.join(absent)}, which has no leaf: the tree has {leaves}")
    ReductionTree(leaves).combine(({node: None for node in nodes} for nodes in owned), add=lambda a, b: None)


class _Rank:
    """Builds one rank's plan: where the nodes it holds lie, piece by piece, and which slots are free."""

    def __init__(self, own: tuple[Node, ...], leaves: int, home: int | None) -> None:
        self.own = {node: given(row) for row, node in enumerate(own)}
        self.leaves = leaves
        self.root = ReductionTree(leaves).root
        self.home = home
        self.held: dict[int, dict[Node, int]] = {}
        self.free: list[int] = []
        self.slots = 0

    def hold(self, piece: int) -> dict[Node, int]:
        return self.held.setdefault(piece, dict(self.own))

    def take(self) -> int:
        if self.free:
            self.free.sort(reverse=True)  # lowest first: slots in a row travel without packing
            return self.free.pop()
        self.slots += 1
        return self.slots - 1

    def give(self, *places: int) -> None:
        self.free.extend(place for place in places if place >= 0)

    def receive(self, peer: int, piece: int, nodes: Iterable[Node]) -> list[tuple[int, int, int]]:
        places = {node: self.take() for node in sorted(nodes)}
        self.hold(piece).update(places)
        return [(peer, piece, place) for place in places.values()]

    def send(self, peer: int, piece: int) -> list[tuple[int, int, int]]:
        return [(peer, piece, place) for _, place in sorted(self.hold(piece).items())]

    def drop(self, piece: int) -> None:
        self.give(*self.held.pop(piece).values())

    def fold(self, piece: int) -> list[tuple[int, int, int, int]]:
        """Add siblings while there are any; a sum overwrites an operand where it may. Only the root of piece ``home`` may go to OUT."""
        adds = []
        stack: list[tuple[Node, int]] = []
        for node, place in sorted(self.hold(piece).items()):
            node = _promote(node, self.leaves, self.root)
            while stack and _siblings(stack[-1][0], node):
                left, left_place = stack.pop()
                node = _promote(left.parent, self.leaves, self.root)
                if node == self.root and piece == self.home:
                    target = OUT
                    self.give(left_place, place)
                elif left_place >= 0:
                    target = left_place
                    self.give(place)
                else:
                    target = place if place >= 0 else self.take()
                adds.append((piece, left_place, place, target))
                place = target
            stack.append((node, place))
        self.held[piece] = dict(stack)
        return adds

    def finish(self, piece: int) -> tuple[tuple[int, int], ...]:
        """The copy that puts the root into the result, if it is not there already; the root is rounded by it."""
        place = self.held[piece].pop(self.root)
        assert not self.held[piece]
        self.held[piece] = {self.root: OUT}
        if place == OUT:
            return ()
        self.give(place)
        return ((piece, place),)


@lru_cache(maxsize=4096)
def make(schedule: str, owned: Owned, leaves: int, rank: int, gather: bool, direct: bool) -> Plan:
    """The plan of ``rank``.

    Args:
        schedule: one of :data:`SCHEDULES`.
        owned: nodes each rank starts with.
        leaves: leaves of the tree.
        gather: every rank gets every piece (all-reduce), or rank ``p`` only piece ``p`` (reduce-scatter; not with ``doubling``).
        direct: the last sum may be written to OUT (its dtype is fp32); otherwise it is copied there and rounded.
    """
    size = len(owned)
    home = 0 if size == 1 or schedule == "doubling" else rank
    me = _Rank(owned[rank], leaves, home if direct else None)
    if size == 1:
        return Plan(rank, (Round(adds=tuple(me.fold(0)), copies=me.finish(0)),), me.slots, cut=False)
    if schedule == "doubling":
        return _doubling(me, owned, leaves, rank)
    rounds = _scatter(me, owned, rank) if schedule == "scatter" else _ring(me, owned, leaves, rank)
    if gather:
        rounds += gather_rounds(size, rank) if schedule == "scatter" else _gather_ring(size, rank)
    return Plan(rank, tuple(rounds), me.slots, cut=True)


def _doubling(me: _Rank, owned: Owned, leaves: int, rank: int) -> Plan:
    """Recursive doubling: at distance d the two halves of each block of 2d ranks swap their nodes.

    Where the upper half has fewer ranks than the lower, its ranks take turns in serving the lower ones, so any number of ranks works in
    ceil(log2 P) rounds; a rank in an upper half of c ranks then sends up to ceil(d / c) messages in that round.
    """
    size = len(owned)
    rounds: list[Round] = []
    distance = 1
    while distance < size:
        start = rank - rank % distance
        other = start ^ distance
        sends: list[tuple[int, int, int]] = []
        recvs: list[tuple[int, int, int]] = []
        if other < size:
            ours, theirs = min(distance, size - start), min(distance, size - other)
            for peer in range(other, other + theirs):
                if start + (peer - other) % ours == rank:
                    sends += me.send(peer, 0)
            nodes: list[Node] = [node for peer in range(other, other + theirs) for node in owned[peer]]
            recvs = me.receive(other + (rank - start) % theirs, 0, nodes if distance == 1 else folded(nodes, leaves))
        last = 2 * distance >= size
        adds = tuple(me.fold(0))
        rounds.append(Round("swap", tuple(sends), tuple(recvs), adds, me.finish(0) if last else ()))
        distance *= 2
    return Plan(rank, tuple(rounds), me.slots, cut=False)


def _scatter(me: _Rank, owned: Owned, rank: int) -> list[Round]:
    """Each piece goes straight to its owner, which adds in the tree's order: one round for the first node of each rank, one for the second...

    A rank sends itself its own piece too: what it sends and what it receives then lie in one run each, and nothing is packed.
    """
    size = len(owned)
    held = me.held[rank] = {}
    rounds: list[Round] = []
    for row in range(max(map(len, owned))):
        sends = [(peer, peer, given(row)) for peer in range(size)] if row < len(owned[rank]) else []
        recvs = []
        for peer in range(size):
            if row < len(owned[peer]):
                held[owned[peer][row]] = me.take()
                recvs.append((peer, rank, held[owned[peer][row]]))
        rounds.append(Round("swap", tuple(sends), tuple(recvs)))
    rounds.append(Round(adds=tuple(me.fold(rank)), copies=me.finish(rank)))
    return rounds


def gather_rounds(size: int, rank: int) -> list[Round]:
    """Every rank's piece to every rank, each piece sent P-1 times.

    For P a power of two by doubling: blocks of pieces lie in one run at both ends, so nothing is packed. Else in one round for which each
    rank packs P copies of its piece.
    """
    rounds = []
    if is_power_of_two(size):
        for level in range(size.bit_length() - 1):
            block = 1 << level
            ours, peer = rank - rank % block, rank ^ block
            theirs = ours ^ block
            sends = tuple((peer, piece, OUT) for piece in range(ours, ours + block))
            rounds.append(Round("swap", sends, tuple((peer, piece, OUT) for piece in range(theirs, theirs + block))))
        return rounds
    return [Round("swap", tuple((peer, rank, OUT) for peer in range(size)), tuple((peer, peer, OUT) for peer in range(size)))]


def _ring(me: _Rank, owned: Owned, leaves: int, rank: int) -> list[Round]:
    """Neighbour links only: piece p starts at rank p + 1 and walks up to rank p.

    The tree's order is fixed and the walk is not, so what travels is the frontier of the ranks visited: siblings that have met are added,
    the others ride along. A vendor's ring carries one piece a hop because it adds in the order of the walk.
    """
    size = len(owned)
    up, down = (rank + 1) % size, (rank - 1) % size
    rounds: list[Round] = []
    for step in range(size - 1):
        leaving, arriving = (rank - step - 1) % size, (rank - step - 2) % size
        visited = [(arriving + 1 + i) % size for i in range(step + 1)]
        sends = me.send(up, leaving)
        nodes = [node for peer in visited for node in owned[peer]]
        recvs = me.receive(down, arriving, nodes if step == 0 else folded(nodes, leaves))
        me.drop(leaving)
        adds = tuple(me.fold(arriving))
        rounds.append(Round("links", tuple(sends), tuple(recvs), adds, me.finish(arriving) if step == size - 2 else ()))
    return rounds


def _gather_ring(size: int, rank: int) -> list[Round]:
    up, down = (rank + 1) % size, (rank - 1) % size
    return [Round("links", ((up, (rank - step) % size, OUT),), ((down, (rank - step - 1) % size, OUT),)) for step in range(size - 1)]

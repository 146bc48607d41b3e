"""The order of sums over the vocabulary, whatever an engine pads it to.

The true vocabulary of ``V`` rows is cut into ``runs`` equal runs of whole blocks (128 rows); a run is the tree over its blocks, the runs
are joined by the tree. In one tree: run ``r``, block ``b`` is leaf ``r * stride + b``, with ``stride`` the next power of two of the
blocks in a run. A rank that holds the rows ``[lo, hi)`` owns every leaf from the one of its first block to the one of the next
rank's first block, absent ones included, so a shard that ends on runs is one node.
"""

from __future__ import annotations

from dataclasses import dataclass

from tio_megatron.contract.tree import Node, ReductionTree, is_power_of_two, next_power_of_two


@dataclass(frozen=True)
class VocabOrder:
    """Blocks, runs and the tree over a vocabulary of ``vocab`` true rows.

    >>> order = VocabOrder(vocab=700, runs=8)
    >>> order.run_rows, order.padded, order.tree.leaves
    (128, 1024, 8)
    >>> [str(node) for node in order.frontier(0, 512)], [str(node) for node in order.frontier(512, 1024)]
    (['0:4'], ['4:8'])
    """

    vocab: int
    runs: int = 8
    block: int = 128

    def __post_init__(self) -> None:
        if self.vocab < 1 or self.block < 1 or not is_power_of_two(self.runs):
            raise ValueError(f"vocabulary order: vocab {self.vocab} and block {self.block} must be positive, runs {self.runs} a power of two")

    @property
    def blocks_per_run(self) -> int:
        """Whole blocks in one run."""
        return -(-self.vocab // (self.runs * self.block))

    @property
    def run_rows(self) -> int:
        """Rows of one run, padding included."""
        return self.blocks_per_run * self.block

    @property
    def padded(self) -> int:
        """The padded vocabulary whose shards end on runs for every tensor-parallel size up to ``runs``."""
        return self.run_rows * self.runs

    @property
    def stride(self) -> int:
        """Leaves of one run in the tree, absent ones counted."""
        return next_power_of_two(self.blocks_per_run)

    @property
    def tree(self) -> ReductionTree:
        """The one tree over all blocks of all runs, absent ones counted."""
        return ReductionTree(self.runs * self.stride)

    def leaf(self, row: int) -> int:
        """The leaf of the block that starts at ``row``; the number of leaves for rows past the contract's padding.

        Raises:
            ValueError: ``row`` is not the start of a block.
        """
        if row < 0 or row % self.block:
            raise ValueError(f"vocabulary row {row} is not the start of a block of {self.block} rows")
        if row >= self.padded:
            return self.tree.leaves
        run, inside = divmod(row // self.block, self.blocks_per_run)
        return run * self.stride + inside

    def rows_of(self, node: Node) -> tuple[int, int] | None:
        """The true rows of ``node``; ``None`` for a node of several runs. An absent node has none: ``lo == hi``.

        >>> order = VocabOrder(vocab=700, runs=2)
        >>> order.rows_of(Node(0, 2)), order.rows_of(Node(2, 2)), order.rows_of(Node(6, 2)), order.rows_of(Node(0, 8))
        ((0, 256), (256, 384), (640, 700), None)
        """
        if node.size > self.stride:
            return None
        run, inside = divmod(node.start, self.stride)
        ends = (min(at, self.blocks_per_run) * self.block for at in (inside, inside + node.size))
        lo, hi = (min(run * self.run_rows + end, self.vocab) for end in ends)
        return lo, hi

    def frontier(self, lo: int, hi: int) -> tuple[Node, ...]:
        """The nodes of the rank that holds the rows ``[lo, hi)``; rows past the true vocabulary are absent.

        Raises:
            ValueError: a bound is not on a block.
        """
        return self.tree.frontier(self.leaf(lo), self.leaf(hi))

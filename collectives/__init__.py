"""Fixed-order sums and moves between ranks. Moves bytes and adds them in the tree's order; knows no model."""

if __name__ != "tio_megatron.collectives":
    raise ImportError("import this package as tio_megatron.collectives; a second copy under the name 'collectives' would hold its own state")

from tio_megatron.collectives.explain import bytes_sent, explain
from tio_megatron.collectives.failure import CollectiveError
from tio_megatron.collectives.move import all_gather, all_max, all_to_all
from tio_megatron.collectives.reduce import all_reduce, all_reduce_nodes, reduce_scatter, reduce_scatter_nodes

__all__ = [
    "CollectiveError",
    "all_gather",
    "all_max",
    "all_reduce",
    "all_reduce_nodes",
    "all_to_all",
    "bytes_sent",
    "explain",
    "reduce_scatter",
    "reduce_scatter_nodes",
]

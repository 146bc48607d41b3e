"""Fixed-order sums and moves between ranks. Moves bytes and adds them in the tree's order; knows no model."""

if __name__ != "tio_megatron.collectives":
    raise ImportError("import this package as tio_megatron.collectives; a second copy under the name 'collectives' would hold its own state")

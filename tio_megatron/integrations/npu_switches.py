"""The table of an NPU's switches, as data: :mod:`.ascend.switches` sets and verifies them, ``tio doctor`` reports them. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """One variable: the value that is set, others that do no harm, and what it is about."""

    name: str
    value: str
    also: tuple[str, ...]
    about: str


SWITCHES = (
    Switch("HCCL_DETERMINISTIC", "strict", ("true",), "HCCL's own sums: the order of ranks"),
    Switch("LCCL_DETERMINISTIC", "1", (), "LCCL's own sums: the order of ranks"),
    Switch("CLOSE_MATMUL_K_SHIFT", "1", (), "products start at the same place of the K axis on every core"),
    Switch("ATB_MATMUL_SHUFFLE_K_ENABLE", "0", (), "ATB's products walk K in order"),
    Switch("ATB_LLM_LCOC_ENABLE", "0", (), "ATB does not fuse products with sums between ranks"),
)

"""The table of an NPU's switches and the verdict on a process's variables: one for the start (:mod:`.ascend.switches`) and ``tio doctor``. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """One variable: the value that is set, others that do no harm, and what it is about."""

    name: str
    value: str
    also: tuple[str, ...]
    about: str

    @property
    def works(self) -> str:
        """The values that may stand there, in words."""
        return " or ".join([self.value, *self.also])


SWITCHES = (
    Switch("HCCL_DETERMINISTIC", "strict", ("true",), "HCCL's own sums: the order of ranks"),
    Switch("LCCL_DETERMINISTIC", "1", (), "LCCL's own sums: the order of ranks"),
    Switch("CLOSE_MATMUL_K_SHIFT", "1", (), "products start at the same place of the K axis on every core"),
    Switch("ATB_MATMUL_SHUFFLE_K_ENABLE", "0", (), "ATB's products walk K in order"),
    Switch("ATB_LLM_LCOC_ENABLE", "0", (), "ATB does not fuse products with sums between ranks"),
)


def against(values: Mapping[str, str]) -> tuple[Switch, ...]:
    """The switches that somebody has set to another value than those that work (compared without case): a start refuses them."""
    return tuple(switch for switch in SWITCHES if values.get(switch.name) and values[switch.name].lower() not in (switch.value, *switch.also))


def missing(values: Mapping[str, str]) -> tuple[Switch, ...]:
    """The switches that are not set, or empty: a start sets them."""
    return tuple(switch for switch in SWITCHES if not values.get(switch.name))

"""The contract that each side will load: one that stands in its own arguments goes before ``TIO_CONTRACT``, as at the start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import read
from tio_megatron.contract.families import FAMILIES
from tio_megatron.findings.finding import Finding, Level
from tio_megatron.findings.messages import shown
from tio_megatron.verify.doctor.running import Running, mapping_of

MEGATRON_OFF = ("0", "off")
"""Values of ``--tio-contract`` that leave the packages stock; a test holds them to the start's."""
KEY = "tio_contract"
TOPIC = "contract"


def of_device(device: str) -> str:
    """The family whose kernels run on ``device``.

    >>> of_device("npu")
    'npu-910b'
    """
    return next(name for name, family in FAMILIES.items() if family.device == device)


def runs_on(contract: Contract, device: str, source: str) -> Iterator[Finding]:
    """Nothing where the kernels of the contract's family run on ``device``: both engines refuse at their start where they do not."""
    theirs = FAMILIES[contract.family].device
    if theirs != device:
        why = f"{source} names family {contract.family}: its kernels run on {theirs}, and looked at is {device}"
        yield Finding(why, f'{{"family": "{of_device(device)}"}} in the contract of both sides; or --device {theirs}', topic=TOPIC)


@dataclass(frozen=True)
class Named:
    """What one side's arguments say: ``contract`` is None where it cannot be read, or where the side is to stay stock."""

    side: str
    source: str
    contract: Contract | None
    finding: Finding | None = None


def of_trainer(run: Running) -> Named | None:
    """``--tio-contract`` of Megatron-LM's command line; None where it says nothing."""
    value = run.get(KEY) if run.kind == "megatron-lm" and KEY in run.written else None
    if value is None:
        return None
    if str(value) in MEGATRON_OFF or value is False:  # YAML reads "off" so
        what = f"trainer: --tio-contract {value or MEGATRON_OFF[0]}: leaves Megatron-LM stock, and no order of its sums is then ours"
        return Named("trainer", "--tio-contract", None, Finding(what, "leave it out, or name the rollout's contract; --stock for stock packages", topic=TOPIC))
    return _named("trainer", "--tio-contract", value if isinstance(value, dict) else str(value))


def of_rollout(run: Running) -> Named | None:
    """``tio_contract`` of vLLM's ``additional_config``, in one piece or dotted; None where it says nothing."""
    value = mapping_of(run, "additional_config").get(KEY)
    return None if value is None else _named("rollout", f"additional_config[{KEY!r}]", value)


def _named(side: str, source: str, value: Any) -> Named:
    try:
        return Named(side, source, read(value).contract)
    except ValueError as error:
        level: Level = "unknown" if "$" in str(value) else "bad"  # a variable of a script is not known here
        return Named(
            side,
            source,
            None,
            Finding(f"{side}: {source} {shown(value)}: {error}", "1, default, a JSON object or the path of a file", level=level, topic=TOPIC),
        )


def judge(named: list[Named], elsewhere: Contract | None, source: str, device: str) -> Iterator[Finding]:
    """What is wrong with the contracts of the arguments: by themselves, on ``device``, and beside each other.

    Args:
        named: of the sides whose arguments name one.
        elsewhere: what a side loads that names none; None where nobody says.
        source: who names that.
        device: ``cpu``, ``cuda`` or ``npu``.
    """
    for one in named:
        if one.finding is not None:
            yield one.finding
        elif one.contract is not None:
            yield from runs_on(one.contract, device, f"{one.side}: {one.source}")
    sides: dict[str, tuple[Contract | None, str]] = {one.side: (one.contract, f"{one.side}: {one.source}") for one in named}
    if len(sides) == 1:
        side = named[0].side
        other = "rollout" if side == "trainer" else "trainer"
        sides[other] = (elsewhere, f"{other}: {source}")
        if elsewhere is None and named[0].contract is not None:
            what = f"{side}: {named[0].source} names the contract of this side alone; the {other} must be given the same"
            yield Finding(what, "TIO_CONTRACT for both sides", level="note", topic=TOPIC)
    (left, first), (right, second) = (sides.get(side, (None, "")) for side in ("trainer", "rollout"))
    if left is not None and right is not None and left != right:
        what = f"two sides, two contracts: {first} and {second} differ in {', '.join(left.differences(right))}"
        yield Finding(what, "one contract for both", topic=TOPIC)

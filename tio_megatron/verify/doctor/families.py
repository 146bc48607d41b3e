"""Whether the kernels of a contract's family run on the device that is looked at: both engines refuse at their start where they do not."""

from __future__ import annotations

from collections.abc import Iterator

from tio_megatron.contract import Contract
from tio_megatron.contract.families import FAMILIES
from tio_megatron.verify.doctor.findings import Finding

TOPIC = "contract"


def of_device(device: str) -> str:
    """The family whose kernels run on ``device``.

    >>> of_device("npu")
    'npu-910b'
    """
    return next(name for name, family in FAMILIES.items() if family.device == device)


def check(contract: Contract, device: str, source: str) -> Iterator[Finding]:
    """Nothing where it fits.

    Args:
        contract: what both sides will load.
        device: ``cpu``, ``cuda`` or ``npu``.
        source: who names the contract.
    """
    theirs = FAMILIES[contract.family].device
    if theirs != device:
        what = f"{source} names family {contract.family}: its kernels run on {theirs}, and looked at is {device}"
        yield Finding("bad", TOPIC, what, f'{{"family": "{of_device(device)}"}} in the contract of both sides; or --device {theirs}')

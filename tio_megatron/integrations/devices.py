"""A kernel family brought into this process, with what its device needs before it."""

from __future__ import annotations

from tio_megatron import kernels
from tio_megatron.contract.families import family as family_of
from tio_megatron.kernels.npu import lowered


def load(name: str) -> None:
    """Make the device of a contract's family ready, then register its kernels. Before process groups and models.

    Raises:
        ValueError: no such family, what it needs is not installed, or a switch of its device is against a fixed order.
        ImportError: a package of the device cannot be imported.
    """
    if family_of(name).device == "npu":
        from tio_megatron.integrations import ascend

        ascend.start()
    kernels.load(name)
    if family_of(name).device == "npu" and not lowered.installed():
        raise ValueError(f"kernel family {name!r} needs {lowered.PACKAGE} for its products, routing and log-softmax (pip install {lowered.PACKAGE})")

"""A kernel family brought into this process, with what its device needs before it."""

from __future__ import annotations

import torch

from tio_megatron import kernels
from tio_megatron.contract.families import family as family_of
from tio_megatron.kernels.npu import lowered


def load(name: str) -> None:
    """Make the device of a contract's family ready, then register its kernels. Before process groups and models.

    Raises:
        ValueError: no such family, what it needs is not installed, this process has not its device, or a switch of the device is against a
            fixed order.
        ImportError: a package of the device cannot be imported.
    """
    if family_of(name).device == "npu":
        from tio_megatron.integrations import ascend

        ascend.start()
    kernels.load(name)
    _require(family_of(name).device, name)
    if family_of(name).device == "npu" and not lowered.installed():
        raise ValueError(f"kernel family {name!r} needs {lowered.PACKAGE} for its products, routing and log-softmax (pip install {lowered.PACKAGE})")


def _require(device: str, name: str) -> None:
    """Else an engine on the CPU would compute with the CPU's kernels under a contract, and a fingerprint, of another family."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if device != "cpu" and (here is None or here.type != device):
        found = "no accelerator" if here is None else here.type
        raise ValueError(f"kernel family {name!r} runs on {device}, and this process has {found}; a contract of family 'cpu' would work on a CPU")

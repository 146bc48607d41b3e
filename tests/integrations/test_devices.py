"""A contract's family belongs to a device: an engine that is not there refuses it."""

import pytest
import torch

import tio_megatron as tio
from tio_megatron.contract import FAMILIES
from tio_megatron.integrations import devices

HERE = torch.accelerator.current_accelerator(check_available=True)


@pytest.mark.skipif(HERE is not None, reason="this machine has an accelerator")
def test_a_family_is_refused_where_its_device_is_not():
    """Without this, tensors on the CPU would go to the CPU's kernels under a fingerprint that says otherwise."""
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="kernel family 'triton-sm90' runs on cuda, and this process has no accelerator; a contract of family 'cpu'"):
        devices.load("triton-sm90")
    with pytest.raises(ValueError, match="runs on cuda"):
        tio.apply(tio.Contract(family="triton-sm90"))


def test_the_cpus_family_is_always_there():
    devices.load("cpu")
    assert FAMILIES["cpu"].device == "cpu"

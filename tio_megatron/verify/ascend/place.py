"""Where the self-check runs: NPUs, or the CPU with the twins behind the same operators."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MOST = 8
"""Devices that are used at most."""


class NoDevices(RuntimeError):
    """There is no NPU to ask."""


@dataclass(frozen=True)
class Place:
    """One process's device. ``lengths`` of sequences to ask about, ``rows`` of products."""

    device: torch.device
    twin: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sequences: around pages and blocks of 512 keys."""
        return (1, 130, 530) if self.twin else (1, 2, 127, 128, 511, 512, 513, 1023, 1025, 1537, 4097)

    @property
    def rows(self) -> tuple[int, ...]:
        """Row counts that make a library choose other tiles."""
        return (1, 3, 16) if self.twin else (1, 2, 3, 7, 16, 17, 64, 127, 128, 129, 512, 2048)

    @property
    def width(self) -> int:
        """Terms of a product."""
        return 256 if self.twin else 2048

    @property
    def repeats(self) -> int:
        """How often a question of run-to-run equality is asked."""
        return 2 if self.twin else 10

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if not self.twin:
            torch.get_device_module("npu").synchronize()

    def time(self, work: Callable[[], Any]) -> float:
        """Milliseconds of one call, the median of some after a first."""
        work()
        spent = []
        for _ in range(3 if self.twin else 20):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            spent.append(1000 * (time.perf_counter() - start))
        return sorted(spent)[len(spent) // 2]

    def random(self, *shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
        """bf16 numbers that are the same on every device and rank."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
        return made.bfloat16().to(self.device)


def find(twin: bool) -> int:
    """The number of devices; in a twin run, CPU processes stand for two.

    Raises:
        NoDevices: torch_npu, CANN or a device is missing; says which.
    """
    if twin:
        return 2
    from tio_megatron.integrations import ascend

    try:
        ascend.start()
        count = int(torch.get_device_module("npu").device_count())
        if count:
            torch.ones(1, device="npu:0").sum().item()
    except (ImportError, RuntimeError) as error:
        raise NoDevices(str(error).splitlines()[0]) from error
    if not count:
        raise NoDevices("torch_npu sees no NPU (npu-smi info lists those of this machine)")
    return min(count, MOST)


def take(rank: int, twin: bool) -> Place:
    """This process's device, ready for the kernels."""
    torch.set_num_threads(1)
    if twin:
        from tio_megatron.kernels.npu import stand_in

        stand_in.install()
        return Place(torch.device("cpu"), True)
    from tio_megatron import kernels
    from tio_megatron.integrations import ascend

    ascend.start()
    kernels.load("npu-910b")  # whatever of it there is: a missing compiler is a row of the report
    torch.get_device_module("npu").set_device(rank)
    return Place(torch.device(f"npu:{rank}"), False)

"""verl's device layer on a CPU. Named in ``VERL_USE_EXTERNAL_MODULES``, before ``tio_megatron.auto``:

    VERL_USE_EXTERNAL_MODULES=tio_megatron.integrations.verl.cpu,tio_megatron.auto

Importing it calls :func:`enable`. It registers a platform through verl's own registry (:mod:`verl.plugin.platform`) and lets megatron-core
run on the CPU (:mod:`tio_megatron.integrations.megatron.cpu_device`). Nothing of verl's logic is replaced: workers, engines, the rollout's
server, the weight transfer and the metrics are verl's. Alone, without a contract, it is the stock control.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry, platform_manager
from verl.plugin.platform.platform_base import PlatformBase

from tio_megatron.contract.environment import from_environment
from tio_megatron.integrations import releases
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.patching import Patch, PatchSet
from tio_megatron.integrations.verl import local_layers
from tio_megatron.integrations.verl.stock_engine import stock_patches

HOST = torch.device("cpu")


class _HostModule(types.ModuleType):
    """What verl calls of ``torch.cuda``, answered for the host. A name that is not here is an error that says so."""

    def __init__(self) -> None:
        super().__init__("tio_megatron.integrations.verl.cpu.host")
        self.Event, self.Stream = torch.cuda.Event, torch.cuda.Stream
        self.get_rng_state, self.set_rng_state = torch.random.get_rng_state, torch.random.set_rng_state

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return HOST

    def set_device(self, device: Any) -> None:
        """There is one."""

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def synchronize(self, device: Any = None) -> None:
        """Everything is done at once."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def ipc_collect(self) -> None:
        """Nothing is shared by handles."""

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """The host's peak cannot be reset."""

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """The host has no such limit."""

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of this process's largest resident set: of all that the host can say it is closest."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes of the host."""
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def current_stream(self, device: Any = None) -> Any:
        return torch.cuda.current_stream()

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"verl asked its device for {name!r}, which tio_megatron.integrations.verl.cpu does not have for a CPU")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """A host as verl's accelerator. Ray counts ranks as its GPUs (``num_gpus``), because verl asks Ray for accelerator numbers by that name."""

    def __init__(self) -> None:
        self._module = _HostModule()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never by itself: it has to be named, so a machine with an accelerator is not run on its host by mistake."""
        return False

    def current_device(self) -> Any:
        """``torch.device("cpu")``, which verl passes to ``.to(...)``; a number would be taken for a CUDA device."""
        return HOST

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_RANKS"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No handles of device memory: weights move through shared memory."""
        return False

    def cudart(self) -> None:
        return None


def enable() -> None:
    """Let verl and megatron-core run on this CPU. Harmless when called again.

    Raises:
        RuntimeError: a CUDA device is present, or a contract is applied already.
    """
    # verl's own switch: engines are registered for "cuda" and "npu"; the first are plain Megatron's.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    cpu_device.enable()
    local_layers.enable()
    _switch.on()
    if not isinstance(platform_manager._current_platform, CpuPlatform):
        platform_manager._current_platform = CpuPlatform()


def disable() -> None:
    """Give verl and megatron-core their devices back."""
    if isinstance(platform_manager._current_platform, CpuPlatform):
        platform_manager._current_platform = None
    _switch.undo()
    local_layers.disable()
    cpu_device.disable()


def _copied(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def receive_weights(self: Any, on_bucket_received: Callable[..., None]) -> None:
        original(self, lambda weights, is_last: on_bucket_received([(name, tensor.clone()) for name, tensor in weights], is_last))

    return receive_weights


def _patches() -> list[Patch]:
    """Where verl takes for granted that the accelerator is not the host."""
    supported = releases.described("verl")
    # No tensor ever lies on the second device.
    twice = 'writes a process group\'s backends as "cpu:gloo,DEVICE:BACKEND", and torch refuses one device twice'
    pinned = "offloads weights to pinned memory, which torch has only beside an accelerator"
    view = "moves a bucket's tensors to the device, which copies them on an accelerator; on a host they would be views of memory that is closed next"
    receiver = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver.receive_weights"
    return [
        *([] if from_environment() else stock_patches()),
        Patch(receiver, _copied, why=view, supported=supported),
        Patch("verl.utils.distributed:get_device_name", lambda original: lambda: "cuda", why=twice, supported=supported),
        Patch("verl.utils.megatron_utils:torch", lambda original: cpu_device.host_torch(), why=pinned, supported=supported),
    ]


_switch = PatchSet(_patches, on_import=True)
enable()

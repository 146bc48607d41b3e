"""Makes stock megatron-core run on CPU and gloo. Changes where things happen, never the order of a sum.

Independent of :func:`tio_megatron.apply`: a stock control on CPU uses this alone. Three kinds of change:

* ``torch.cuda`` functions that only raise on a CPU build (current device, streams, random state) answer for the CPU;
* in the few megatron modules that write ``device="cuda"`` the module's name ``torch`` is a proxy that creates on the CPU, so that torch's
  own factory functions stay untouched for everybody else;
* what gloo or a CPU refuses (uneven gathers, sequence parallelism in the torch norm, split sizes as tensors) is done another way.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.patching import Patch, PatchSet

CPU = torch.device("cpu")

_LITERAL_CUDA = (
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
"""Modules that write a CUDA device as a literal."""

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "rand", "tensor", "zeros", "zeros_like")


def enable() -> None:
    """Let megatron-core run on this CPU. Harmless when called again.

    Raises:
        RuntimeError: a CUDA device is present, which this module would hide; or a contract is applied already.
        MovedSymbolError: another version of megatron-core is installed.
    """
    if _patches.is_on:
        return
    if state.session() is not None:
        raise RuntimeError("cpu_device: a contract is applied already, and these patches would lie on top of its own; enable the device first")
    if torch.cuda.is_available():
        raise RuntimeError("cpu_device: a CUDA device is present; hide it (CUDA_VISIBLE_DEVICES=) before asking megatron-core to run on the CPU")
    _patches.on()


def disable() -> None:
    """Restore every symbol. Harmless when not enabled."""
    _patches.undo()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """:func:`enable` for the length of a block; leaves it on if it was on before."""
    was = _patches.is_on
    enable()
    try:
        yield
    finally:
        if not was:
            disable()


class _Stream:
    """A stream of a device that does everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


class _Event:
    """An event of a device that does everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


_STREAM = _Stream()


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _HostTorch(types.ModuleType):
    """``torch`` as a module of megatron-core sees it: the same, but what it creates lies on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def host_torch() -> types.ModuleType:
    """A stand-in for the name ``torch`` in a module that writes ``device="cuda"``."""
    return _HostTorch()


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """In this block a tensor's type reads ``torch.cuda.…``: the optimizers sort parameters by that string."""
    original = torch.Tensor.type

    def typed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = typed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _under_cuda_type_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` run with :func:`_cuda_type_names`."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return original(*args, **kwargs)

    return wrapped


def _norm_under_sequence_parallel(original: Any) -> Any:
    """The torch norm refuses sequence parallelism only because it does not tag its weights; tagged, their gradients are summed over TP."""
    build = original.__func__ if isinstance(original, staticmethod) else original

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            module: torch.nn.Module = build(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for weight in module.parameters():
            weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        return module

    return staticmethod(new)


def _gather_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """gloo gathers only equal sizes: pad to the largest, gather, cut."""

    def gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def _reduce_scatter_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """gloo has no uneven reduce-scatter: all-reduce with the vendor's order, then keep our part."""

    def reduce_scatter(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        total = input_.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    return reduce_scatter


def _splits_as_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """Split sizes already lie on the CPU; the collective wants them as numbers, as the stock code makes them of CUDA tensors."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _table() -> list[Patch]:
    """Every symbol that stands in the way of a CPU."""
    host_torch = _HostTorch()
    cuda = "never reached on a CPU build except by megatron-core, which takes CUDA for granted"
    patches = [
        Patch(f"torch.cuda:{name}", _constant(value), why=cuda)
        for name, value in (
            ("current_device", _constant(CPU)),
            ("synchronize", _constant(None)),
            ("empty_cache", _constant(None)),
            ("Stream", _Stream),
            ("Event", _Event),
            ("current_stream", _constant(_STREAM)),
            ("default_stream", _constant(_STREAM)),
            ("stream", contextlib.nullcontext),
            ("get_rng_state", lambda *args, **kwargs: torch.random.get_rng_state()),
            ("set_rng_state", lambda state, *args, **kwargs: torch.random.set_rng_state(state)),
            ("manual_seed", lambda seed: torch.default_generator.manual_seed(seed) and None),
        )
    ]
    patches += [Patch(f"torch.cuda.nvtx:{name}", _constant(_constant(None)), why=cuda) for name in ("range_push", "range_pop")]
    patches += [
        Patch("torch:Tensor.cuda", _constant(lambda self, *args, **kwargs: self), why="moves to a device that is not there", may_be_absent=True),
        Patch("torch.nn:Module.cuda", _constant(lambda self, *args, **kwargs: self), why="moves to a device that is not there"),
        Patch("torch:Tensor.record_stream", _constant(lambda self, stream: None), why="there is one stream", may_be_absent=True),
    ]
    patches += [Patch(f"{module}:torch", _constant(host_torch), why='writes device="cuda"') for module in _LITERAL_CUDA]
    rng = "megatron.core.tensor_parallel.random"
    patches += [
        Patch(f"{rng}:_get_cuda_rng_state", _constant(lambda *args, **kwargs: torch.random.get_rng_state()), why="reads CUDA generators"),
        Patch(f"{rng}:_set_cuda_rng_state", _constant(lambda state, *args, **kwargs: torch.random.set_rng_state(state)), why="writes CUDA generators"),
        Patch("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _norm_under_sequence_parallel, why="refuses sequence parallelism"),
        Patch("megatron.core.tensor_parallel.mappings:_gather_along_first_dim", _gather_uneven, why="gloo refuses uneven sizes"),
        Patch("megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim", _reduce_scatter_uneven, why="gloo refuses uneven sizes"),
        Patch("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu", _splits_as_lists, why="converts only CUDA tensors"),
        Patch("megatron.core.transformer.moe.moe_utils:te_general_gemm", _constant(None), why="left undefined without TransformerEngine", may_be_absent=True),
        Patch("megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__", _under_cuda_type_names, why="sorts parameters by type name"),
        Patch("megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32", _under_cuda_type_names, why="asserts the type name of gradients"),
        Patch("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__", _under_cuda_type_names, why="sorts parameters by type name"),
    ]
    return patches


_patches = PatchSet(_table)

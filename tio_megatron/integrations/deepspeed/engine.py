"""``DeepSpeedEngine`` under a contract: what happens when it is built, in each backward pass, and before each step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tio_megatron.contract.grid import MEANS, MEANS_TERMS
from tio_megatron.integrations.deepspeed import refusals, workers
from tio_megatron.integrations.deepspeed.model import adopt
from tio_megatron.integrations.deepspeed.norms import OVER_TENSOR, OrderedNorm
from tio_megatron.integrations.deepspeed.peers import check_groups, check_save, peers_of, places_of_experts
from tio_megatron.integrations.deepspeed.state import refuse_run, session
from tio_megatron.integrations.deepspeed.sums import GradientSums, Place


def check(original: Callable[..., None]) -> Callable[..., None]:
    """``_do_sanity_check``: the configuration is read, and nothing has happened to the model yet."""

    @functools.wraps(original)
    def _do_sanity_check(self: Any) -> None:
        if session() is not None:
            workers.meet()
            refusals.check_engine(self)
        original(self)

    return _do_sanity_check


def prepare(original: Callable[..., None]) -> Callable[..., None]:
    """``_configure_distributed_model``: after AutoTP has cut the model, and before anything is cast, broadcast or built on it."""

    @functools.wraps(original)
    def _configure_distributed_model(self: Any, model: Any) -> None:
        setting = session()
        if setting is not None:
            refusals.check_model(model, max(1, self.autotp_size()), strided=self._config.use_data_before_expert_parallel_)
            adopt(model, setting, peers_of(self))
            self.tio_setting = setting
        original(self, model)
        if setting is not None and self.autotp_size() > 1:
            check_groups(model, self.autotp_size())

    return _configure_distributed_model


def prepare_inference(original: Callable[..., None]) -> Callable[..., None]:
    """``InferenceEngine.__init__``: refuse first; when stock has cut and cast the model, it becomes ours."""

    @functools.wraps(original)
    def __init__(self: Any, model: Any, config: Any) -> None:
        setting = session()
        if setting is not None:
            workers.meet()
            refusals.check_inference(config, model)
        original(self, model, config)
        if setting is not None:
            adopt(self.module, setting)

    return __init__


def configure_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    """``_configure_optimizer``: sums for all parameters; ZeRO's own hooks, which would reduce gradients, go."""

    @functools.wraps(original)
    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> None:
        original(self, client_optimizer, model_parameters)
        setting = getattr(self, "tio_setting", None)
        if setting is None:
            return
        here = self.gradient_accumulation_steps()
        held = {id(one) for group in self.basic_optimizer.param_groups for one in group["params"]}
        if self.zero_optimization():
            held = {id(one) for group in self.optimizer.bit16_groups for one in group}
        norms = {id(module.weight) for module in self.module.modules() if isinstance(module, OrderedNorm)}
        experts = places_of_experts(self)
        parameters = [
            (name, one, experts.get(id(one)) or _place(self, one), MEANS_TERMS if id(one) in norms else MEANS)
            for name, one in self.module.named_parameters()
            if id(one) in held and one.requires_grad
        ]
        self.tio_sums = GradientSums(parameters, here * self.seq_dp_world_size, here, lambda: refuse_run(setting))
        if self.zero_optimization():
            self.optimizer.tio_sums = self.tio_sums
            while self.optimizer._grad_acc_hooks:
                self.optimizer._grad_acc_hooks.pop().remove()

    return _configure_optimizer


def _place(engine: Any, parameter: Any) -> Place:
    tensor = peers_of(engine)
    if tensor is None:
        return Place(engine.seq_data_parallel_group)
    if getattr(parameter, "tensor_model_parallel", False):
        return Place(engine.seq_data_parallel_group, shards=tensor)
    copied = dist.get_rank(tensor) > 0
    if getattr(parameter, OVER_TENSOR, False):
        return Place(dist.group.WORLD, copied=copied)
    return Place(engine.seq_data_parallel_group, copied=copied)


def backward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``backward``: the loss of a micro-batch as it is. The sum is divided by their number once, stock divides each by a part of it."""

    @functools.wraps(original)
    def backward(self: Any, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        sums = getattr(self, "tio_sums", None)
        if sums is None:
            return original(self, loss, retain_graph, scale_wrt_gas)
        refuse_run(self.tio_setting)
        if not scale_wrt_gas:
            raise ValueError(
                "engine.backward: scale_wrt_gas=False is for losses that are divided already, each with its own rounding; give it the mean over this "
                "micro-batch"
            )
        if getattr(self.optimizer, "_coalesce_grad_reduction", False):
            raise ValueError("engine.coalesce_grad_reduction() under a contract is not covered: gradients are added once a step all the same; leave it out")
        sums.seen += 1
        whole = original(self, loss, retain_graph, scale_wrt_gas=False)
        return whole / self.gradient_accumulation_steps()

    return backward


def backward_prologue(original: Callable[..., None]) -> Callable[..., None]:
    """``_backward_prologue``: hooks call it for ``loss.backward()`` too, which nobody would count."""

    @functools.wraps(original)
    def _backward_prologue(self: Any) -> None:
        if hasattr(self, "tio_sums") and not self._running_engine_backward:
            raise RuntimeError("loss.backward() under a contract is not covered: call engine.backward(loss), which counts micro-batches")
        original(self)

    return _backward_prologue


def no_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    """``no_sync``: its steps are not counted by the engine."""

    @functools.wraps(original)
    def no_sync(self: Any) -> Any:
        if hasattr(self, "tio_sums"):
            raise ValueError("engine.no_sync() under a contract is not covered: gradient_accumulation_steps in the configuration would work")
        return original(self)

    return no_sync


def allreduce_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """``allreduce_gradients``, called after each backward pass: at the last one of a step all ranks' integers become gradients."""

    @functools.wraps(original)
    def allreduce_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
        sums = getattr(self, "tio_sums", None)
        if sums is None:
            original(self, *args, **kwargs)
            return
        boundary = self.is_gradient_accumulation_boundary()
        if hasattr(self.optimizer, "set_gradient_accumulation_boundary"):
            self.optimizer.set_gradient_accumulation_boundary(boundary)
        if boundary:
            try:
                found = sums.settle()
            except (ArithmeticError, ValueError):
                # This step will not happen: the next backward pass is the first of another, without a call of step().
                self.micro_steps += 1
                if self.zero_optimization():
                    self.optimizer.exit_backward()
                raise
            hand_over = _to_partitions if self.zero_optimization() else _to_parameters
            hand_over(self, found)

    return allreduce_gradients


def _to_parameters(engine: Any, found: dict[int, Tensor]) -> None:
    for p in engine.tio_sums.parameters:
        p.parameter.grad = found[id(p.parameter)]


@torch.no_grad()
def _to_partitions(engine: Any, found: dict[int, Tensor]) -> None:
    """What ZeRO's step expects: this rank's partition of each group, as pieces."""
    zero = engine.optimizer
    for i, mine in enumerate(zero.params_in_partition):
        zero.all_grad_tensors[i] = [found[id(parameter)] for parameter in mine]
        zero.averaged_gradients[i] = zero.get_flat_partition(
            mine, zero.first_offset[i], zero.partition_size[i], dtype=torch.float32, device=engine.device, param_group_idx=i, return_tensor_list=True
        )
        zero.all_grad_tensors[i] = None


def compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """``compile``: graphs of DeepSpeed's were not looked at."""

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A001  (stock's name)
        if hasattr(self, "tio_sums"):
            raise ValueError("engine.compile() under a contract is not covered; running without it would work")
        return original(self, *args, **kwargs)

    return compile


def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """``save_checkpoint``: with the largest partials, which the next step's grid comes from."""

    @functools.wraps(original)
    def save_checkpoint(self: Any, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any) -> Any:
        extra = dict(client_state or {})
        if hasattr(self, "tio_sums"):
            check_save(self)
            extra[KEY] = _largest(self)
        return original(self, save_dir, tag, extra, *args, **kwargs)

    return save_checkpoint


def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_checkpoint``: the inverse. A checkpoint that was not made under a contract starts the grids anew."""

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        path, client_state = original(self, *args, **kwargs)
        if hasattr(self, "tio_sums") and path is not None:
            known = (client_state or {}).pop(KEY, {})
            for name, p in _named(self):
                p.largest = float(known.get(name, 0.0))
                p.reset()
        return path, client_state

    return load_checkpoint


KEY = "tio_megatron_largest_partials"
"""In a checkpoint's client state."""


def _named(engine: Any) -> Iterator[tuple[str, Any]]:
    """Every sum under a name that belongs to no layout: an expert has its number in the whole layer."""
    from deepspeed.moe.layer import MoE

    first = {
        f"{name}.deepspeed_moe.experts.deepspeed_experts.".lstrip("."): dist.get_rank(module.deepspeed_moe.ep_group) * module.num_local_experts
        for name, module in engine.module.named_modules()
        if isinstance(module, MoE)
    }
    for p in engine.tio_sums.parameters:
        prefix = next((prefix for prefix in first if p.name.startswith(prefix)), None)
        if prefix is None:
            yield p.name, p
        else:
            number, _, rest = p.name[len(prefix) :].partition(".")
            yield f"{prefix}{int(number) + first[prefix]}.{rest}", p


def _largest(engine: Any) -> dict[str, float]:
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, {name: p.largest for name, p in _named(engine)})
    return {name: value for theirs in each for name, value in theirs.items()}

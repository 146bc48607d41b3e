"""The patches that make megatron-core's DDP keep, join and finalize gradients as exact integer sums. They call :mod:`.grad_sums`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from tio_megatron.contract.misfits import offered, powers_that_divide
from tio_megatron.integrations.megatron.applied.moe_refusals import has_balance_loss
from tio_megatron.integrations.megatron.training import micro_batches
from tio_megatron.integrations.megatron.training.grad_sums import BufferPart, BufferSums, Groups, Works, add_parts, reduce_bucket, settle, sums_of
from tio_megatron.integrations.megatron.training.optimizer_refusals import check_ddp
from tio_megatron.integrations.patching import Patch

DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
FINALIZE = "megatron.core.distributed.finalize_model_grads"

_ordered = False
"""Whether the module that DDP is wrapping now was built under a contract."""


def grad_patches() -> tuple[Patch, ...]:
    """All of them."""
    return (
        Patch(f"{DDP}.__init__", wrap, why="knows which model is wrapped; refuses losses whose scale depends on the layout", stock="everything else of DDP"),
        Patch(f"{DDP}._make_backward_post_hook", hook, why="a gradient from autograd must not be added to integers as if they were fp32"),
        Patch(f"{BUFFERS}:_ParamAndGradBuffer.__init__", allocate, why="the one place that allocates fp32 gradients", stock="buckets and their padding"),
        Patch(f"{BUFFERS}:_ParamAndGradBuffer.reset", reset, why="opens the sums for the next step"),
        Patch(f"{BUFFERS}:_ParamAndGradBuffer.reload_from_cpu", reload, why="memory that comes back after offloading holds anything"),
        Patch(f"{BUFFERS}:_ParamAndGradBucketGroup.start_grad_sync", start_grad_sync, why="the one place where DDP adds gradients over ranks"),
        Patch(
            f"{FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
            sum_over_tensor,
            why="norms and routers under sequence parallelism, query and key norms",
            stock="parameters averaged over tensor parallelism: they are refused",
        ),
        Patch(
            "megatron.core.tensor_parallel.random:CheckpointFunction.forward",
            recompute,
            why="a part of a layer that runs again, after later micro-batches began, must know whose rows it has",
            stock="recomputation itself",
        ),
        Patch(f"{FINALIZE}:_allreduce_word_embedding_grads", finish, why="tied embeddings; the last sum before gradients are scaled"),
    )


def finalize_weighted_grads(model: Sequence[Any], num_tokens: Any = None, **more: Any) -> None:
    """megatron-core's ``finalize_model_grads`` without the division by the tokens of the global batch.

    For losses whose weights count every token once already. Give it as ``config.finalize_model_grads_func``.

    Raises:
        ValueError: the model has an auxiliary loss. It is added to losses summed over tokens, and divided with them.
    """
    from megatron.core.distributed import finalize_model_grads

    for sums in sums_of(model):
        sums.seen.weighted = True
        if has_balance_loss(get_model_config(model[0])):
            raise ValueError("finalize_weighted_grads: seq_aux_loss is divided by the tokens of the batch; use finalize_model_grads, or moe_aux_loss_coeff=0.0")
    finalize_model_grads(model, None, **more)


def wrap(original: Callable[..., None]) -> Callable[..., None]:
    """``DistributedDataParallel.__init__``: integer sums for a model of ours, stock for any other."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        global _ordered
        ours = _built_by_us(module)
        if ours and not config.calculate_per_token_loss:
            raise ValueError(
                "DistributedDataParallel: calculate_per_token_loss=False averages the loss over micro-batches and ranks, one after the other, so gradients "
                "would depend on the layout; set calculate_per_token_loss=True and let the loss function return (sum of the losses, tokens, report)"
            )
        if ours and config.num_query_groups is not None and config.num_query_groups < config.tensor_model_parallel_size:
            raise ValueError(
                f"DistributedDataParallel: tp {config.tensor_model_parallel_size} is above the {config.num_query_groups} key/value groups: gradients of a "
                f"shared group would be rounded on each of its ranks; {offered('tp', powers_that_divide(config.num_query_groups))}"
            )
        if ours:
            check_ddp(ddp_config, [parameter.dtype for parameter in module.parameters() if parameter.requires_grad])
        before, _ordered = _ordered, ours
        try:
            original(self, config, ddp_config, module, *args, **kwargs)
        finally:
            _ordered = before

    return __init__


def allocate(original: Callable[..., None]) -> Callable[..., None]:
    """``_ParamAndGradBuffer.__init__``: integers behind the fp32 gradients."""

    @functools.wraps(original)
    def __init__(
        self: Any, ddp_config: Any, param_dtype: Any, grad_dtype: Any, params: Any, data_parallel_group: Any, bucket_size: Any, param_to_name: Any, *rest: Any
    ) -> None:
        original(self, ddp_config, param_dtype, grad_dtype, params, data_parallel_group, bucket_size, param_to_name, *rest)
        if _ordered:
            self.tio_expert = not getattr(params[0], "allreduce", True)
            self.tio_sums = BufferSums(self, param_to_name)

    return __init__


def reset(original: Callable[..., None]) -> Callable[..., None]:
    """``_ParamAndGradBuffer.reset``."""

    @functools.wraps(original)
    def reset(self: Any) -> None:
        if hasattr(self, "tio_sums"):
            self.tio_sums.reset()
        else:
            original(self)

    return reset


def reload(original: Callable[..., None]) -> Callable[..., None]:
    """``_ParamAndGradBuffer.reload_from_cpu``: stock zeroes the fp32 half alone."""

    @functools.wraps(original)
    def reload_from_cpu(self: Any, move_params: bool = True, move_grads: bool = True) -> None:
        empty = self.grad_data_size > 0
        original(self, move_params, move_grads)
        if move_grads and empty and hasattr(self, "tio_sums"):
            self.tio_sums.reset()

    return reload_from_cpu


def hook(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DistributedDataParallel._make_backward_post_hook``."""

    @functools.wraps(original)
    def _make_backward_post_hook(self: Any, param: Any) -> Any:
        stock = original(self, param)

        def checked(*unused: Any) -> None:
            if hasattr(param, "tio_sum"):
                # Our layers return no gradient, or zeros where DDP insists on one.
                if param.grad is not None and (not self.ddp_config.overlap_grad_reduce or bool(param.grad.any())):
                    # Raising here would leave the other ranks waiting: it is noted, and all ranks raise when the gradients are finalized.
                    param.tio_sum.foreign = True
                # Stock would add it to main_grad, whose memory holds integers, and not its own alone: even +0 changes bits of those. Of a tied
                # embedding that has everything in one stage it does so whatever the first flag says.
                param.grad_added_to_main_grad, param.zero_out_wgrad = True, False
            stock(*unused)

        return checked

    return _make_backward_post_hook


def start_grad_sync(original: Callable[..., None]) -> Callable[..., None]:
    """``_ParamAndGradBucketGroup.start_grad_sync``: 64-bit integers in place of fp32."""

    @functools.wraps(original)
    def start_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
        if not all(hasattr(bucket, "tio_low") for bucket in self.buckets):
            original(self, force_all_reduce=force_all_reduce)
            return
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        scatter = self.ddp_config.use_distributed_optimizer and not force_all_reduce
        group = self.intra_distributed_optimizer_instance_group if self.ddp_config.use_distributed_optimizer else self.data_parallel_group
        overlap = self.ddp_config.overlap_grad_reduce
        works = [work for bucket in self.buckets for work in reduce_bucket(bucket, group, scatter=scatter, wait=not overlap)]
        self.grad_reduce_handle = Works(works) if overlap else None

    return start_grad_sync


def recompute(original: Any) -> Any:
    """``CheckpointFunction.forward``: the second run has the micro-batch of the first."""

    @functools.wraps(original.__func__)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        batch = micro_batches.current()

        def again(*inputs: Any) -> Any:
            micro_batches.resume(batch)
            return run_function(*inputs)

        return original.__func__(ctx, again, *args)

    return staticmethod(forward)


def sum_over_tensor(original: Callable[..., None]) -> Callable[..., None]:
    """``_allreduce_non_tensor_model_parallel_grads``."""

    @functools.wraps(original)
    def _allreduce_non_tensor_model_parallel_grads(model: Sequence[Any], config: Any, tp_group: Any = None) -> None:
        if not any(True for _ in sums_of(model)):
            original(model, config, tp_group)
            return
        groups = _groups(config, tp_group)
        averaged = [p.name for p in _parameters(model) if getattr(p.parameter, "average_gradients_across_tp_domain", False)]
        if averaged:
            raise ValueError(f"average_gradients_across_tp_domain of {averaged[0]} is not supported")
        add_parts([p for p in _parameters(model) if groups.sums_over_tensor(p)], groups.tensor)

    return _allreduce_non_tensor_model_parallel_grads


def finish(original: Callable[..., None]) -> Callable[..., None]:
    """``_allreduce_word_embedding_grads``, and then :func:`settle`."""

    @functools.wraps(original)
    def _allreduce_word_embedding_grads(model: Sequence[Any], config: Any, embd_group: Any = None, pp_group: Any = None) -> None:
        if not any(True for _ in sums_of(model)):
            original(model, config, embd_group, pp_group)
            return
        groups = _groups(config, None, embd_group)
        tied = _tied(model, groups.embedding)
        if tied is not None:
            add_parts([tied], groups.embedding)
        settle(model, tied, groups)

    return _allreduce_word_embedding_grads


def _built_by_us(module: Any) -> bool:
    while not hasattr(module, "tio_setting") and hasattr(module, "module"):
        module = module.module
    return hasattr(module, "tio_setting")


def _parameters(model: Sequence[Any]) -> list[BufferPart]:
    return [p for sums in sums_of(model) for p in sums.parameters]


def _groups(config: Any, tensor: Any = None, embedding: Any = None) -> Groups:
    return Groups(
        tensor=parallel_state.get_tensor_model_parallel_group() if tensor is None else tensor,
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        embedding=parallel_state.get_embedding_group(check_initialized=False) if embedding is None else embedding,
        sequence_parallel=config.sequence_parallel,
        qk_norm=config.qk_layernorm,
    )


def _tied(model: Sequence[Any], group: Any) -> BufferPart | None:
    """The embedding that the first and the last stage both hold, if this rank is one of them."""
    if group is None or group.size() == 1 or torch.distributed.get_rank() not in torch.distributed.get_process_group_ranks(group):
        return None
    chunk = model[0] if parallel_state.is_pipeline_first_stage(ignore_virtual=True) else model[-1]
    inner = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    if not inner.share_embeddings_and_output_weights:
        return None
    found: BufferPart = inner.shared_embedding_or_output_weight().tio_sum
    return found

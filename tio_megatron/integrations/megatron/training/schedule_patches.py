"""The patches of megatron-core's schedules: they watch what a training step is given, so that a bad step ends with one error on all ranks.

A rank that raised in the middle of a schedule would leave the others waiting for it. So nothing raises there: what is wrong is noted, and
:func:`.grad_sums.settle` asks all ranks and raises on all of them, before anything has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tio_megatron.integrations.megatron.training.grad_refusals import Seen
from tio_megatron.integrations.megatron.training.grad_sums import sums_of
from tio_megatron.integrations.patching import Patch

SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def schedule_patches() -> tuple[Patch, ...]:
    """All of them."""
    names = ("forward_backward_no_pipelining", "forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving")
    why = "get_forward_backward_func() reads this name each time; here all ranks still do the same"
    return tuple(Patch(f"{SCHEDULES}:{name}", watch, why=why, stock="the schedule itself") for name in names)


def watch(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule. For models whose gradients are integer sums it notes what each loss function returns."""

    @functools.wraps(original)
    def schedule(*, forward_step_func: Callable[..., Any], model: Any, forward_only: bool = False, **more: Any) -> Any:
        chunks = model if isinstance(model, list) else [model]
        sums = [] if forward_only else list(sums_of(chunks))
        if any(not one.adding for one in sums):
            raise RuntimeError("a training step after the gradients were finalized: call zero_grad_buffer() on the model before each step")
        if not sums:
            return original(forward_step_func=forward_step_func, model=model, forward_only=forward_only, **more)
        count = more.get("num_microbatches")
        if isinstance(count, int) and count < 1:
            raise ValueError(f"a training step of {count} micro-batches: an empty batch has no gradient; leave the step out, on every rank")

        def step(iterator: Any, chunk: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
            try:
                output, loss = forward_step_func(iterator, chunk, *rest, **options)
            except StopIteration as end:
                raise ValueError(f"the data iterator ended before the {count} micro-batches of the step (num_microbatches)") from end
            return output, None if loss is None else _noted(loss, sums[0].seen)

        return original(forward_step_func=step, model=model, forward_only=forward_only, **more)

    return schedule


def _noted(loss: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    @functools.wraps(loss)
    def noted(*args: Any, **kwargs: Any) -> Any:
        found = loss(*args, **kwargs)
        if not kwargs.get("non_loss_data", False):
            seen.losses += 1
            if len(found) == 3:
                seen.tokens.append(torch.as_tensor(found[1]).detach().clone())
        return found

    return noted

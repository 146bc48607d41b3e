"""Adam as a ``torch.optim.Optimizer`` over fp32 main parameters. What shards or copies them is an engine's own affair.

State of a parameter: ``exp_avg`` and ``exp_avg_sq``, fp32, of its shape. The number of steps taken is ``step``, a whole number in the
parameter's group: every group counts every step, one without parameters on this rank too, so that ranks never disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tio_megatron.kernels.adam import Scalars, adam_


class Adam(torch.optim.Optimizer):
    """Adam with one definition of every rounding: :mod:`tio_megatron.kernels.adam`.

    Args:
        params: parameters or groups; a group may set its own ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: see ``adam_w_mode``.
        adam_w_mode: decoupled weight decay (AdamW); otherwise it is added to the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=0))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        Raises:
            ValueError: a parameter or gradient that is not fp32, or a number of a group outside its range; no parameter is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = []
        for group in self.param_groups:
            scalars = Scalars.at(
                int(group["step"]) + 1,
                lr=group["lr"],
                betas=tuple(group["betas"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=self.adam_w_mode,
            )
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _check(parameter)
                    work.append((parameter, scalars))
        for parameter, scalars in work:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            adam_(parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"], scalars)
        for group in self.param_groups:
            group["step"] = int(group["step"]) + 1
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state, also one in which each parameter counts its own steps (torch's way).

        Raises:
            ValueError: parameters of one group have taken different numbers of steps, or nothing says how many.
        """
        super().__setstate__(state)
        for group in self.param_groups:
            mine = [self.state[parameter] for parameter in group["params"] if parameter in self.state]
            counted = {int(held.pop("step")) for held in mine if "step" in held}
            if len(counted) > 1:
                raise ValueError(f"adam: parameters of one group have taken {sorted(counted)} steps; all must have taken the same number")
            if counted:
                group["step"] = counted.pop()
            elif "step" in group and group["step"] is not None:
                group["step"] = int(group["step"])
            elif any(mine):
                raise ValueError("adam: the loaded state holds moments, but neither its groups nor its parameters say after how many steps")
            else:
                group["step"] = 0


def _check(parameter: torch.Tensor) -> None:
    grad = parameter.grad
    assert grad is not None
    for what, tensor in (("a parameter", parameter), ("a gradient", grad)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"adam: {what} of shape {list(tensor.shape)} is {tensor.dtype}; main parameters and gradients must be torch.float32")
        if tensor.is_sparse or not tensor.is_contiguous():
            raise ValueError(f"adam: {what} of shape {list(tensor.shape)} is not dense and contiguous")

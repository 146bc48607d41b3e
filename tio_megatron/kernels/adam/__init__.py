"""One step of Adam, elementwise and in place. Which numbers a rank holds never changes their bits; who owns them is for ``layers``.

The rule is that of D. P. Kingma and J. Ba, "Adam: A Method for Stochastic Optimization" (2014), algorithm 1, with weight decay either
added to the gradient (L2) or decoupled from it: I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization" (2017), algorithm 2.
The papers leave the roundings open. Ours, everything fp32, ``fma`` with one rounding, ``[..]`` one rounding::

    g = fma(decay, w, g)                      only L2
    m = fma(beta1, m, [new1 * g])
    v = fma(beta2, v, [[new2 * g] * g])
    w = fma(-decay, w, w)                     only decoupled
    w = fma(-rate, [m / fma([sqrt(v)], correction, eps)], w)

(A weight times ``1 - lr * weight_decay``, as it is often written, would lose most digits of a small decay: near 1 fp32 has steps of 6e-8.)
The scalars do not depend on the element. They are computed in float64 with correctly rounded operations only (no library's ``pow``)
and rounded to fp32 once: see :class:`Scalars`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tio_megatron.kernels.adam import cpu
from tio_megatron.kernels.operands import check_dtype, check_shape, require

__all__ = ["Scalars", "adam_", "power"]


@dataclass(frozen=True)
class Scalars:
    """The numbers of one step, float64 here and rounded to fp32 once by the kernel.

    Args:
        beta1, new1: the first moment's decay and one minus it.
        beta2, new2: the second moment's.
        eps: added to the root of the second moment, after its correction.
        decay: decoupled: the part of a weight that is taken away, ``lr * weight_decay``; L2: ``weight_decay``.
        rate: ``lr / (1 - beta1 ** step)``.
        correction: ``1 / sqrt(1 - beta2 ** step)``.
        decoupled: which of the two decays.
    """

    beta1: float
    new1: float
    beta2: float
    new2: float
    eps: float
    decay: float
    rate: float
    correction: float
    decoupled: bool

    @classmethod
    def at(cls, step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool = True) -> Scalars:
        """Of step ``step``, counted from 1.

        Raises:
            ValueError: a number outside its range, by name.
        """
        beta1, beta2 = map(float, betas)
        require(type(step) is int and step >= 1, "adam", f"step is {step!r}; steps are whole numbers from 1")
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            require(0.0 <= beta < 1.0, "adam", f"{name} is {beta!r}; it must be in [0, 1)")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            require(value is not None and 0.0 <= float(value) < math.inf, "adam", f"{name} is {value!r}; it must be finite and at least 0")
        decay = lr * weight_decay if decoupled else weight_decay
        rate = lr / (1.0 - power(beta1, step))
        correction = 1.0 / math.sqrt(1.0 - power(beta2, step))
        return cls(beta1, 1.0 - beta1, beta2, 1.0 - beta2, float(eps), float(decay), rate, correction, decoupled)


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring, products alone: the same bits whatever the C library.

    >>> power(0.5, 10) == 2.0**-10, power(0.9, 0)
    (True, 1.0)
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def adam_(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Scalars, out: Tensor | None = None) -> None:
    """One step on fp32 ``weight``, ``exp_avg`` and ``exp_avg_sq``, in place; all of one shape and contiguous.

    Args:
        weight: the fp32 main parameter.
        grad: fp32, read only.
        exp_avg: the first moment.
        exp_avg_sq: the second moment.
        scalars: of this step.
        out: where given, a bf16 tensor that gets the new weight, rounded half to even, in the same pass.

    Raises:
        ValueError: another type, shape, memory layout or device.
    """
    for name, tensor in (("weight", weight), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_dtype("adam", name, tensor, torch.float32)
        check_shape("adam", name, tensor, *weight.shape)
        require(tensor.is_contiguous(), "adam", f"{name} of shape {list(tensor.shape)} is not contiguous")
    if out is not None:
        check_dtype("adam", "out", out, torch.bfloat16)
        check_shape("adam", "out", out, *weight.shape)
        require(out.is_contiguous(), "adam", f"out of shape {list(out.shape)} is not contiguous")
    s = scalars
    cpu.adam_(weight, grad, exp_avg, exp_avg_sq, out, [s.beta1, s.new1, s.beta2, s.new2, s.eps, s.decay, s.rate, s.correction], s.decoupled)

"""exp, log and the tree's sum on the CPU (``csrc/elementwise.cpp``), as the operators ``tio::exp``, ``tio::log`` and ``tio::tree_add``."""

from __future__ import annotations

from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads

_exp = bind("tio_exp", pointer, pointer, size, integer)
_log = bind("tio_log", pointer, pointer, size, integer)
_tree_add = bind("tio_tree_add", pointer, size, size, pointer, integer)


def _exp_cpu(x: Tensor) -> Tensor:
    x, y = x.contiguous(), x.new_empty(x.shape)
    _exp(x.data_ptr(), y.data_ptr(), x.numel(), threads())
    return y


def _log_cpu(x: Tensor) -> Tensor:
    x, y = x.contiguous(), x.new_empty(x.shape)
    _log(x.data_ptr(), y.data_ptr(), x.numel(), threads())
    return y


def _tree_add_cpu(parts: Tensor) -> Tensor:
    parts, y = parts.contiguous(), parts.new_empty(parts.shape[1:])
    _tree_add(parts.data_ptr(), parts.shape[0], y.numel(), y.data_ptr(), threads())
    return y


exp = operator("exp(Tensor x) -> Tensor", _exp_cpu, fake=lambda x: x.new_empty(x.shape))
log = operator("log(Tensor x) -> Tensor", _log_cpu, fake=lambda x: x.new_empty(x.shape))
tree_add = operator("tree_add(Tensor parts) -> Tensor", _tree_add_cpu, fake=lambda parts: parts.new_empty(parts.shape[1:]))

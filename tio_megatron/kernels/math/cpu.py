"""exp, log and the tree's sum on the CPU, as the operators ``tio::exp``, ``tio::log`` and ``tio::tree_add``."""

from __future__ import annotations

from tio_megatron.kernels.library import operator
from tio_megatron.kernels.math import reference

exp = operator("exp(Tensor x) -> Tensor", reference.exp, fake=lambda x: x.new_empty(x.shape))
log = operator("log(Tensor x) -> Tensor", reference.log, fake=lambda x: x.new_empty(x.shape))
tree_add = operator("tree_add(Tensor parts) -> Tensor", reference.tree_add, fake=lambda parts: parts.new_empty(parts.shape[1:]))

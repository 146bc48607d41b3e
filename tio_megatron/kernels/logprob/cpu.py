"""Parts of the log-softmax on the CPU (``csrc/logprob.cpp``), as ``tio::vocab_max``, ``tio::vocab_sumexp``, ``tio::log_softmax`` and others."""

from __future__ import annotations

import ctypes

from torch import Tensor

from tio_megatron.contract import VocabOrder
from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads
from tio_megatron.kernels.operands import dense_last

_max = bind("tio_vocab_max", pointer, size, size, size, pointer, integer)
_sumexp = bind("tio_vocab_sumexp", pointer, size, size, size, pointer, integer, size, size, size, size, size, pointer, pointer, size, pointer, integer)
_log_softmax = bind("tio_log_softmax", pointer, size, size, size, size, size, size, size, pointer, integer)
_gather = bind("tio_gather_logprob", pointer, pointer, pointer, pointer, size)
_gradient = bind("tio_logprob_backward", pointer, pointer, size, pointer, pointer, pointer, size, size, size, pointer, integer)
_entropy = bind("tio_entropy", pointer, pointer, pointer, size)
_entropy_gradient = bind("tio_entropy_backward", pointer, pointer, size, pointer, pointer, pointer, size, size, size, pointer, integer)


def _vocab_max_cpu(logits: Tensor, true_cols: int) -> Tensor:
    logits, top = dense_last(logits), logits.new_empty(logits.shape[0])
    _max(logits.data_ptr(), logits.stride(0), logits.shape[0], true_cols, top.data_ptr(), threads())
    return top


def _vocab_sumexp_cpu(logits: Tensor, top: Tensor, vocab: int, runs: int, block: int, lo: int, hi: int, weighted: bool) -> Tensor:
    order = VocabOrder(vocab, runs, block)
    nodes = order.frontier(lo, hi)
    logits, top = dense_last(logits), top.contiguous()
    out = logits.new_empty(len(nodes), logits.shape[0])
    starts, sizes = (ctypes.c_int64 * len(nodes))(*(n.start for n in nodes)), (ctypes.c_int64 * len(nodes))(*(n.size for n in nodes))
    columns, tree = max(0, min(hi, vocab) - lo), (block, order.blocks_per_run, order.stride, runs)
    given = (logits.data_ptr(), logits.stride(0), logits.shape[0], columns, top.data_ptr(), weighted)
    _sumexp(*given, lo, *tree, starts, sizes, len(nodes), out.data_ptr(), threads())
    return out


def _log_softmax_cpu(logits: Tensor, vocab: int, runs: int, block: int) -> Tensor:
    order = VocabOrder(vocab, runs, block)
    logits, y = dense_last(logits), logits.new_empty(logits.shape[0], vocab)
    tree = (block, order.blocks_per_run, order.stride, runs)
    _log_softmax(logits.data_ptr(), logits.stride(0), logits.shape[0], vocab, *tree, y.data_ptr(), threads())
    return y


def _gather_cpu(x: Tensor, top: Tensor, total: Tensor) -> Tensor:
    x, top, total, y = x.contiguous(), top.contiguous(), total.contiguous(), x.new_empty(x.shape)
    _gather(x.data_ptr(), top.data_ptr(), total.data_ptr(), y.data_ptr(), x.numel())
    return y


def _logprob_backward_cpu(d: Tensor, logits: Tensor, top: Tensor, total: Tensor, target: Tensor, true_cols: int) -> Tensor:
    logits, d, top, total, target = dense_last(logits), d.contiguous(), top.contiguous(), total.contiguous(), target.contiguous()
    out = logits.new_empty(logits.shape)
    _gradient(
        d.data_ptr(),
        logits.data_ptr(),
        logits.stride(0),
        top.data_ptr(),
        total.data_ptr(),
        target.data_ptr(),
        *logits.shape,
        true_cols,
        out.data_ptr(),
        threads(),
    )
    return out


def _entropy_cpu(total: Tensor, weighted: Tensor) -> Tensor:
    total, weighted, y = total.contiguous(), weighted.contiguous(), total.new_empty(total.shape)
    _entropy(total.data_ptr(), weighted.data_ptr(), y.data_ptr(), total.numel())
    return y


def _entropy_backward_cpu(d: Tensor, logits: Tensor, top: Tensor, total: Tensor, weighted: Tensor, true_cols: int) -> Tensor:
    logits, d, top, total, weighted = dense_last(logits), d.contiguous(), top.contiguous(), total.contiguous(), weighted.contiguous()
    out = logits.new_empty(logits.shape)
    rows = (d.data_ptr(), logits.data_ptr(), logits.stride(0), top.data_ptr(), total.data_ptr(), weighted.data_ptr())
    _entropy_gradient(*rows, *logits.shape, true_cols, out.data_ptr(), threads())
    return out


def _sumexp_fake(logits: Tensor, top: Tensor, vocab: int, runs: int, block: int, lo: int, hi: int, weighted: bool) -> Tensor:
    return logits.new_empty(len(VocabOrder(vocab, runs, block).frontier(lo, hi)), logits.shape[0])


vocab_max = operator("vocab_max(Tensor logits, int true_cols) -> Tensor", _vocab_max_cpu, fake=lambda logits, true_cols: logits.new_empty(logits.shape[0]))
vocab_sumexp = operator(
    "vocab_sumexp(Tensor logits, Tensor max, int vocab, int runs, int block, int lo, int hi, bool weighted) -> Tensor",
    _vocab_sumexp_cpu,
    fake=_sumexp_fake,
)
log_softmax = operator(
    "log_softmax(Tensor logits, int vocab, int runs, int block) -> Tensor",
    _log_softmax_cpu,
    fake=lambda logits, vocab, runs, block: logits.new_empty(logits.shape[0], vocab),
)
gather_logprob = operator("gather_logprob(Tensor x, Tensor max, Tensor sum) -> Tensor", _gather_cpu, fake=lambda x, top, total: x.new_empty(x.shape))
logprob_backward = operator(
    "logprob_backward(Tensor d, Tensor logits, Tensor max, Tensor sum, Tensor target, int true_cols) -> Tensor",
    _logprob_backward_cpu,
    fake=lambda d, logits, top, total, target, true_cols: logits.new_empty(logits.shape),
)
entropy = operator("entropy(Tensor sum, Tensor weighted) -> Tensor", _entropy_cpu, fake=lambda total, weighted: total.new_empty(total.shape))
entropy_backward = operator(
    "entropy_backward(Tensor d, Tensor logits, Tensor max, Tensor sum, Tensor weighted, int true_cols) -> Tensor",
    _entropy_backward_cpu,
    fake=lambda d, logits, top, total, weighted, true_cols: logits.new_empty(logits.shape),
)

"""Log-softmax and entropy over a vocabulary that may be cut over ranks: maximum, sums by the vocabulary's tree, log-probability, entropy.

What joins the ranks is not here. ``T`` tokens, ``V`` columns of this rank's shard, ``F`` nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.contract import VocabOrder
from tio_megatron.kernels.logprob import cpu
from tio_megatron.kernels.operands import check_dtype, check_shape, require

__all__ = ["entropy", "entropy_backward", "gather_logprob", "log_softmax", "logprob_backward", "vocab_max", "vocab_sumexp"]


def _check(what: str, logits: Tensor, columns: int) -> None:
    check_dtype(what, "logits", logits, torch.float32)
    check_shape(what, "logits", logits, -1, -1)
    require(0 <= columns <= logits.shape[1], what, f"{columns} true columns, but logits has {logits.shape[1]}")


def vocab_max(logits: Tensor, true_cols: int) -> Tensor:
    """``[T]``: the largest of the first ``true_cols`` columns of ``logits[T, V]`` fp32. No autograd.

    NaN is not counted (it reaches the row through the sum), -0 becomes +0, and no column gives -inf; columns past ``true_cols`` are never
    read. The maximum of several shards is exact in any order.

    Raises:
        ValueError: not an fp32 matrix, or a device without kernels, or it is narrower than ``true_cols``.
    """
    _check("vocab_max", logits, true_cols)
    return cpu.vocab_max(logits, true_cols)


def vocab_sumexp(logits: Tensor, max: Tensor, order: VocabOrder, lo: int, hi: int, *, weighted: bool = False) -> Tensor:
    """``[F, T]`` fp32: the partial sums of exp(x - max), one for each node of ``order.frontier(lo, hi)``. No autograd.

    Args:
        logits: ``[T, V]`` fp32, column c is row ``lo + c`` of the vocabulary. Columns past the true vocabulary are never read and may be
            missing.
        max: ``[T]`` fp32, the maximum over all shards.
        order: the vocabulary's order.
        lo, hi: the rows of the vocabulary this shard holds, padding included; both on blocks (``hi`` may be the true vocabulary).
        weighted: sum exp(d) * d instead, with d = x - max (a row at -inf adds nothing): what :func:`entropy` needs.

    Raises:
        ValueError: shapes or types do not fit, or a bound is not on a block.
    """
    hi = order.padded if hi == order.vocab else hi
    columns = min(hi, order.vocab) - lo if lo < order.vocab else 0
    _check("vocab_sumexp", logits, columns)
    check_dtype("vocab_sumexp", "max", max, torch.float32)
    check_shape("vocab_sumexp", "max", max, logits.shape[0])
    order.frontier(lo, hi)
    return cpu.vocab_sumexp(logits, max, order.vocab, order.runs, order.block, lo, hi, weighted)


def gather_logprob(x_target: Tensor, max: Tensor, sum: Tensor) -> Tensor:
    """``(x_target - max) - log(sum)``, fp32 tensors of one shape. No autograd.

    Raises:
        ValueError: shapes or types do not fit.
    """
    for name, tensor in (("x_target", x_target), ("max", max), ("sum", sum)):
        check_dtype("gather_logprob", name, tensor, torch.float32)
        check_shape("gather_logprob", name, tensor, *x_target.shape)
    return cpu.gather_logprob(x_target, max, sum)


def log_softmax(logits: Tensor, order: VocabOrder) -> Tensor:
    """``[T, vocab]`` fp32: the log-probability of every true row of the vocabulary, from whole ``logits[T, V]``, V at least vocab. No autograd.

    Byte for byte what :func:`gather_logprob` gives for each column.

    Raises:
        ValueError: not an fp32 matrix, or a device without kernels, or narrower than the vocabulary.
    """
    _check("log_softmax", logits, order.vocab)
    return cpu.log_softmax(logits, order.vocab, order.runs, order.block)


def entropy(sum: Tensor, weighted: Tensor) -> Tensor:
    """``log(S) - W / S``, fp32 tensors of one shape: S is the whole vocabulary's sum of exp(d), W that of exp(d) * d. No autograd.

    Raises:
        ValueError: shapes or types do not fit.
    """
    for name, tensor in (("sum", sum), ("weighted", weighted)):
        check_dtype("entropy", name, tensor, torch.float32)
        check_shape("entropy", name, tensor, *sum.shape)
    return cpu.entropy(sum, weighted)


def logprob_backward(dlogprob: Tensor, logits: Tensor, max: Tensor, sum: Tensor, target: Tensor, true_cols: int) -> Tensor:
    """``dlogits[T, V]`` fp32 = dlogprob * (onehot(target) - exp(x - max) / sum); +0 past ``true_cols``.

    Args:
        dlogprob, max, sum: ``[T]`` fp32; ``sum`` is the whole vocabulary's.
        logits: ``[T, V]`` fp32, this shard's.
        target: ``[T]`` int64, the column in this shard; outside ``0 .. true_cols`` where another shard has it.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _check("logprob_backward", logits, true_cols)
    for name, tensor in (("dlogprob", dlogprob), ("max", max), ("sum", sum)):
        check_dtype("logprob_backward", name, tensor, torch.float32)
        check_shape("logprob_backward", name, tensor, logits.shape[0])
    check_dtype("logprob_backward", "target", target, torch.int64)
    check_shape("logprob_backward", "target", target, logits.shape[0])
    return cpu.logprob_backward(dlogprob, logits, max, sum, target, true_cols)


def entropy_backward(dentropy: Tensor, logits: Tensor, max: Tensor, sum: Tensor, weighted: Tensor, true_cols: int) -> Tensor:
    """``dlogits[T, V]`` fp32 = dentropy * p * (W / S - (x - max)) with p = exp(x - max) / S; +0 past ``true_cols``.

    Args:
        dentropy, max, sum, weighted: ``[T]`` fp32; S and W are the whole vocabulary's.
        logits: ``[T, V]`` fp32, this shard's.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _check("entropy_backward", logits, true_cols)
    for name, tensor in (("dentropy", dentropy), ("max", max), ("sum", sum), ("weighted", weighted)):
        check_dtype("entropy_backward", name, tensor, torch.float32)
        check_shape("entropy_backward", name, tensor, logits.shape[0])
    return cpu.entropy_backward(dentropy, logits, max, sum, weighted, true_cols)

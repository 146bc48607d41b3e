"""Parts of the log-softmax on the CPU, as ``tio::vocab_*``, ``tio::log_softmax``, ``tio::gather_logprob`` and ``tio::logprob_backward``."""

from __future__ import annotations

from torch import Tensor

from tio_megatron.contract import VocabOrder
from tio_megatron.kernels.library import operator
from tio_megatron.kernels.logprob import reference


def _sumexp_cpu(logits: Tensor, top: Tensor, vocab: int, runs: int, block: int, lo: int, hi: int) -> Tensor:
    return reference.vocab_sumexp(logits, top, VocabOrder(vocab, runs, block), lo, hi)


def _log_softmax_cpu(logits: Tensor, vocab: int, runs: int, block: int) -> Tensor:
    return reference.log_softmax(logits, VocabOrder(vocab, runs, block))


vocab_max = operator("vocab_max(Tensor logits, int true_cols) -> Tensor", reference.vocab_max, fake=lambda logits, true_cols: logits.new_empty(logits.shape[0]))
vocab_sumexp = operator(
    "vocab_sumexp(Tensor logits, Tensor max, int vocab, int runs, int block, int lo, int hi) -> Tensor",
    _sumexp_cpu,
    fake=lambda logits, top, vocab, runs, block, lo, hi: logits.new_empty(len(VocabOrder(vocab, runs, block).frontier(lo, hi)), logits.shape[0]),
)
log_softmax = operator(
    "log_softmax(Tensor logits, int vocab, int runs, int block) -> Tensor",
    _log_softmax_cpu,
    fake=lambda logits, vocab, runs, block: logits.new_empty(logits.shape[0], vocab),
)
gather_logprob = operator(
    "gather_logprob(Tensor x, Tensor max, Tensor sum) -> Tensor", reference.gather_logprob, fake=lambda x, top, total: x.new_empty(x.shape)
)
logprob_backward = operator(
    "logprob_backward(Tensor d, Tensor logits, Tensor max, Tensor sum, Tensor target, int true_cols) -> Tensor",
    reference.logprob_backward,
    fake=lambda d, logits, top, total, target, true_cols: logits.new_empty(logits.shape),
)

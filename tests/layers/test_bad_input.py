"""Arguments that do not fit are refused in one line that says what, where and what would work: not by torch's words, and never accepted in silence."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tio_megatron import collectives
from tio_megatron.collectives import explain
from tio_megatron.contract import VocabOrder
from tio_megatron.integrations.vllm import engine_options
from tio_megatron.layers.attention import attention
from tio_megatron.layers.linear import column_parallel, row_parallel
from tio_megatron.layers.norm import rms_norm
from tio_megatron.layers.router import route_tokens
from tio_megatron.layers.vocab import VocabShard, vocab_embedding, vocab_logprob

SHARD = VocabShard(VocabOrder(700, 128), 768)
ids = torch.tensor([[699]])


def z(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def packed(*starts: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


HALF = torch.bfloat16
NAN = float("nan")
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "column, weight half": (lambda: column_parallel(z(2, 8), z(4, 8, dtype=HALF)), "column_parallel: x is torch.float32 but the weight is torch.bfloat16"),
    "column, x half": (lambda: column_parallel(z(2, 8, dtype=HALF), z(4, 8)), "column_parallel: x is torch.bfloat16 but the weight is torch.float32"),
    "row, weight half": (lambda: row_parallel(z(2, 8), z(4, 8, dtype=HALF), leaves=1), "row_parallel: x is torch.float32 but the weight is torch.bfloat16"),
    "row, x half": (lambda: row_parallel(z(2, 8, dtype=HALF), z(4, 8), leaves=1), "row_parallel: x is torch.bfloat16 but the weight is torch.float32"),
    "no starts": (lambda: attention(z(3, 2, 32), z(3, 2, 32), z(3, 2, 32), scale=1, cu_seqlens=packed()), "cu_seqlens has shape [0]; expected [sequences + 1]"),
    "starts of two axes": (lambda: attention(*[z(3, 2, 32)] * 3, scale=1, cu_seqlens=packed(0, 3)[None]), "cu_seqlens has shape [1, 2]"),
    "starts for a batch": (lambda: attention(*[z(3, 1, 2, 32)] * 3, scale=1, cu_seqlens=packed(0, 3)), "expected q [T, Q, D] and k, v [T, G, D]"),
    "a pack without starts": (lambda: attention(*[z(3, 2, 32)] * 3, scale=1), "expected q [S, B, Q, D] and k, v [S, B, G, D]"),
    "fewer keys": (lambda: attention(z(3, 1, 2, 32), z(2, 1, 2, 32), z(2, 1, 2, 32), scale=1), "q has shape [3, 1, 2, 32], k [2, 1, 2, 32]"),
    "fewer keys, packed": (lambda: attention(z(3, 2, 32), z(2, 2, 32), z(2, 2, 32), scale=1, cu_seqlens=packed(0, 3)), "q has shape [3, 2, 32], k [2, 2, 32]"),
    "fewer values": (lambda: attention(z(3, 1, 2, 32), z(3, 1, 2, 32), z(2, 1, 2, 32), scale=1), "v [2, 1, 2, 32]"),
    "scale": (lambda: attention(*[z(3, 1, 2, 32)] * 3, scale=NAN), "scale is nan; expected a finite number"),
    "embedding of other rows": (lambda: vocab_embedding(ids, z(100, 8), SHARD), "the weight has shape [100, 8]; this rank's shard is [768, H]"),
    "embedding of one axis": (lambda: vocab_embedding(ids, z(768), SHARD), "the weight has shape [768]"),
    "targets": (lambda: vocab_logprob(z(2, 768), torch.tensor([1, 2, 3]), SHARD), "the target has shape [3] for logits [2, 768]; expected [2]"),
    "padding of another length": (
        lambda: route_tokens(z(4, 8), 2, normalise=True, padding=z(3, dtype=torch.bool)),
        "padding is torch.bool [3]; expected torch.bool [4]",
    ),
    "padding of numbers": (lambda: route_tokens(z(4, 8), 2, normalise=True, padding=z(4, dtype=torch.int64)), "padding is torch.int64 [4]"),
    "eps below 0": (lambda: rms_norm(z(2, 8), z(8), -1.0), "eps is -1.0; expected a finite number of at least 0"),
    "eps no number": (lambda: rms_norm(z(2, 8), z(8), NAN), "eps is nan"),
    "a negative length": (lambda: collectives.explain(4, [-4]), "no negative length, got [-4]"),
    "very many ranks": (lambda: collectives.explain(10**9, [4]), "explain: 1000000000 ranks; plans of doubling are made for up to 1024"),
    "many ranks in a ring": (lambda: collectives.explain(129, [4], schedule="ring"), "plans of ring are made for up to 128"),
    "no ranks of vLLM": (lambda: engine_options(tp=0), "tp is 0; expected a whole number of ranks, at least 1"),
    "ranks that no leaves fall to": (lambda: engine_options(tp=3), "tp is 3, which does not divide the contract's cuts.attn_row"),
    "a milliard ranks": (lambda: engine_options(tp=10**9), "tp is 1000000000, which does not divide the contract's"),
    "a shape of words": (lambda: explain(4, ["a"]), "explain: a shape is a list of whole numbers, got ['a']"),
    "ranks in words": (lambda: engine_options(tp="x"), "tp is 'x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    act, words = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        act()
    assert "\n" not in str(refused.value)

"""Gradients of activations have one order too: what reaches the embedding has the same bytes in every layout. (Sums over tokens are the next issue's.)"""

from functools import cache

import pytest
import torch
from context_plants import gradients_summed_over_ranks
from tiny_megatron import Setup, losses, on_ranks_each

from tio_megatron.contract import Layout
from tio_megatron.kernels import linear as products
from tio_megatron.layers import context
from tio_megatron.layers.context import global_rows
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing import assert_same_bytes, first_mismatch
from tio_megatron.testing.qwen3 import DENSE, write_tiny

TOKENS = torch.randint(700, (4, 73), generator=torch.Generator().manual_seed(5))
KINDS = {"fp32": dict(torch_dtype="float32"), "bf16 tied": dict(tie_word_embeddings=True)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("gradients")
    return {kind: write_tiny(root / kind, DENSE, **fields) for kind, fields in KINDS.items()}


def at_the_embedding(folders, layout, micro_batches):
    """By kind: the gradient ``[S, samples, H]`` of the embedding's output."""

    def work(model, _):
        seen = []
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(lambda module, inputs, out: out.register_hook(lambda grad: seen.append(grad.clone())) and None)
        losses(model, TOKENS.chunk(micro_batches), backward=True, weight=1 / 256)
        return torch.cat(seen, 1) if seen else None

    ranks = on_ranks_each([Setup(path, layout) for path in folders.values()], work)
    first_stage = [dict(zip(folders, found, strict=True)) for found in ranks if found[0] is not None]
    if not layout.sp:
        assert_same_bytes(first_stage, [first_stage[rank - rank % layout.tp] for rank in range(len(first_stage))], "every rank of TP has the whole gradient")
        first_stage = first_stage[:: layout.tp]
    whole = {kind: torch.cat([found[kind] for found in first_stage]) for kind in folders}
    order = global_rows(Sequences(ranks=layout.cp), (TOKENS.shape[1] - 1) // layout.cp).argsort()
    return {kind: rows[order] for kind, rows in whole.items()}


@pytest.fixture(scope="module")
def expected(folders):
    return cache(lambda: at_the_embedding(folders, Layout(), 1))


@pytest.mark.parametrize(
    "layout, micro_batches",
    [
        (Layout(), 4),
        (Layout(tp=2), 1),
        (Layout(tp=4, sp=True), 2),
        (Layout(tp=2, pp=2, sp=True), 4),
        (Layout(cp=2), 2),
        (Layout(tp=2, cp=2, sp=True), 1),
        pytest.param(Layout(tp=2, sp=True), 1, marks=pytest.mark.full),
        pytest.param(Layout(tp=4), 1, marks=pytest.mark.full),
        pytest.param(Layout(pp=2), 2, marks=pytest.mark.full),
        pytest.param(Layout(cp=4), 1, marks=pytest.mark.full),
        pytest.param(Layout(pp=2, cp=2), 2, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_same_bytes_as_one_rank(layout, micro_batches, folders, expected):
    assert_same_bytes(expected(), at_the_embedding(folders, layout, micro_batches), f"{layout}, {micro_batches} micro-batches")


def test_a_planted_order_is_caught(folders, expected, monkeypatch):
    """One leaf per rank instead of the contract's."""
    product = products.matmul
    monkeypatch.setattr(products, "matmul", lambda a, b, *, leaves=1, paired=False, out_dtype=torch.float32: product(a, b, paired=paired, out_dtype=out_dtype))
    wrong = at_the_embedding(folders, Layout(tp=2), 1)
    assert all(first_mismatch(expected()[kind], wrong[kind]) for kind in folders)


def test_gradients_of_keys_added_over_ranks_are_caught(folders, expected, monkeypatch):
    monkeypatch.setattr(context, "attention", gradients_summed_over_ranks(2))
    wrong = at_the_embedding(folders, Layout(cp=2), 1)
    assert all(first_mismatch(expected()[kind], wrong[kind]) for kind in folders)

"""Context parallelism through whole models: packed samples, gradients, recomputation; and what is refused."""

from functools import cache

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from tiny_megatron import Setup, losses, on_ranks, on_ranks_each

from tio_megatron.collectives import all_gather
from tio_megatron.contract import Layout
from tio_megatron.layers.context import all_tokens, own_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing import assert_same_bytes
from tio_megatron.testing.qwen3 import DENSE, MOE, write_tiny

KINDS = {
    "fp32": dict(config=DENSE, torch_dtype="float32"),
    "one key head": dict(config=DENSE, num_key_value_heads=1),
    "moe": dict(config=MOE, torch_dtype="float32"),
}
DENSE_KINDS = ("fp32", "one key head")
"""One key/value head does not divide by the ranks, so tokens are gathered."""
TRUE, PADDED = torch.tensor([0, 100, 100, 105, 150], dtype=torch.int32), torch.tensor([0, 104, 104, 112, 160], dtype=torch.int32)
"""Samples of 100, 0, 5 and 45 tokens, padded to chunks for 4 ranks, and 16 tokens of padding behind them."""
TOKENS, LABELS = torch.randint(700, (2, 1, 176), generator=torch.Generator().manual_seed(4))
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("context")
    return cache(lambda kind: write_tiny(root / kind, **KINDS[kind]))


def packed_step(model, _):
    """Losses of the packed samples and the gradient of the embedding's output, whole."""
    group = parallel_state.get_context_parallel_group()
    # The longest sample is given without its padding, as some callers do.
    packing = PackedSeqParams("thd", TRUE, TRUE, PADDED, PADDED, max_seqlen_q=100, max_seqlen_kv=100)
    cut = Sequences(PADDED, group.rank(), group.size())
    seen = []
    model.embedding.register_forward_hook(lambda module, inputs, out: out.register_hook(seen.append) and None)
    tokens = own_tokens(TOKENS, cut)
    loss = model(tokens, torch.zeros_like(tokens), None, labels=own_tokens(LABELS, cut), packed_seq_params=packing)
    (loss.sum() / 64).backward()
    rows = all_gather(seen[0], parallel_state.get_tensor_model_parallel_group()) if model.config.sequence_parallel else seen[0]
    return [all_tokens(each, cut, group) for each in (loss, rows.transpose(0, 1))]


def stepped(folder, layout, kinds, **fields):
    results = on_ranks_each([Setup(folder(kind), layout, fields=fields) for kind in kinds], packed_step)
    assert_same_bytes(results, [results[0]] * len(results))
    return dict(zip(kinds, results[0], strict=True))


@pytest.fixture(scope="module")
def expected(folder):
    return cache(lambda kinds: stepped(folder, Layout(), kinds))


@pytest.mark.parametrize(
    "layout, kinds, fields",
    [
        (Layout(cp=2), DENSE_KINDS, RECOMPUTE),
        (Layout(cp=2, ep=2), ("moe",), dict(moe_token_dispatcher_type="allgather")),
        pytest.param(Layout(cp=2), DENSE_KINDS, {}, marks=pytest.mark.full),
        pytest.param(Layout(cp=4), DENSE_KINDS, {}, marks=pytest.mark.full),
        pytest.param(Layout(tp=2, cp=2, sp=True), ("fp32",), dict(cp_comm_type="a2a"), marks=pytest.mark.full),
        pytest.param(Layout(tp=2, cp=2, ep=2, sp=True), ("moe",), {}, marks=pytest.mark.full),
        pytest.param(Layout(tp=2, cp=2, ep=4, etp=1, sp=True), ("moe",), RECOMPUTE, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_losses_and_gradients_of_packed_samples_are_those_of_one_rank(layout, kinds, fields, folder, expected):
    assert_same_bytes(expected(kinds), stepped(folder, layout, kinds, **fields), str(layout))


def test_what_is_refused_and_what_stock_cuts_alike(folder):
    def work(model, _):
        tokens = torch.arange(24).view(1, 24)
        cut = Sequences(None, parallel_state.get_context_parallel_rank(), 2)
        mine = own_tokens(tokens, cut)
        assert_same_bytes(get_batch_on_this_cp_rank({"tokens": tokens})["tokens"], mine)
        said = []
        for part, mask, starts in (
            (mine, torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1), None),
            (mine[:, :7], None, None),
            (mine, None, [0, 6, 24]),
            (mine, None, [0, 12]),
        ):
            given = None if starts is None else torch.tensor(starts, dtype=torch.int32)
            packing = None if given is None else PackedSeqParams("thd", given, given, max_seqlen_q=24, max_seqlen_kv=24)
            try:
                model(part, part, mask, packed_seq_params=packing)
                said.append(None)
            except ValueError as error:
                said.append(str(error))
        return said

    for mask, odd, uneven, padded in on_ranks(Setup(folder("fp32"), Layout(cp=2)), work):
        assert "under context parallelism is not supported; pass None" in mask
        assert "sample 0 has 14 tokens, which do not divide into 4 chunks; pad it" in odd
        assert "sample 0 has 6 tokens, which do not divide into 4 chunks; pad it" in uneven
        assert padded is None


def test_a_batch_that_does_not_divide_is_refused(folder):
    def work(model, _):
        with pytest.raises(ValueError, match="10 tokens do not divide into 4 chunks; pad them"):
            losses(model, [torch.zeros(1, 11, dtype=torch.int64)])

    on_ranks(Setup(folder("fp32"), Layout(cp=2)), work)

"""Training with the sequence-wise auxiliary loss gives one rank's bytes in every layout, and counts the loss once."""

import contextlib
import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron import finalize_weighted_grads
from tio_megatron.integrations.megatron.training import micro_batches
from tio_megatron.layers import balance
from tio_megatron.testing import RankError, assert_same_bytes, first_mismatch, run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

HELD = tempfile.TemporaryDirectory(prefix="tio-aux-loss-")


@functools.cache
def recipe(loss=0.02):
    if loss != 0.02:
        return replace(recipe(), aux_loss=loss)
    return Recipe(write_tiny(Path(HELD.name) / "model", MOE, hidden_size=64, num_attention_heads=4), 2, samples=4, shortest=6, longest=24, aux_loss=loss)


@pytest.fixture(scope="module", autouse=True)
def model():
    """Written before ranks start: they must not each write it."""
    recipe()


def train(rank, what, cut, plant=contextlib.nullcontext):
    """The digest after the steps, and what megatron-core's log holds of the last one on this rank."""
    run = Training(what, cut, Contract(grain=8))
    for _ in range(what.steps):
        clear_aux_losses_tracker()
        with plant():
            run.step()
    logged = get_moe_layer_wise_logging_tracker()
    found = run.sha256(), {name: entry["values"].clone() for name, entry in logged.items()}
    run.close()
    return found


@functools.cache
def alone(loss=0.02):
    return run_ranks(1, train, recipe(loss), parse("tp1"), timeout=300)[0]


def digests(cut, plant=contextlib.nullcontext):
    return {digest for digest, _ in run_ranks(cut.layout.ranks, train, recipe(), cut, plant, timeout=300)}


@pytest.mark.parametrize(
    "cut",
    [
        parse("tp2+ep2+allgather", micro_batch=2, recompute=True),
        parse("pp2", packed=True, micro_batch=2),
        pytest.param(parse("dp2", micro_batch=2, order="interleaved", overlap=True, distributed_optimizer=True), marks=pytest.mark.full),
        pytest.param(parse("ep2", order="by length", grouped=False), marks=pytest.mark.full),
        pytest.param(parse("cp2", packed=True, micro_batch=4), marks=pytest.mark.full),
        pytest.param(parse("cp2+tp2+ep2"), marks=pytest.mark.full),
        pytest.param(parse("tp4+ep2+etp2", micro_batch=4), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_same_bytes_as_one_rank(cut):
    assert digests(cut) == {alone()[0]}


def counts_of_this_rank():
    """A planted error: nobody asks the ranks that hold the rest of a sample."""

    class Alone:
        @staticmethod
        def all_gather(x, group):
            return x

    @contextlib.contextmanager
    def planted():
        before, balance.collectives = balance.collectives, Alone
        try:
            yield
        finally:
            balance.collectives = before

    return planted()


def test_it_has_an_effect_and_a_planted_error_is_caught():
    assert alone()[0] != alone(0.0)[0] and not alone(0.0)[1]
    assert digests(parse("tp2+ep2+allgather", micro_batch=2), counts_of_this_rank) != {alone()[0]}


def test_recomputation_counts_it_once():
    again = run_ranks(1, train, recipe(), parse("tp1", recompute=True), timeout=300)[0]
    assert again[0] == alone()[0]
    assert_same_bytes(again[1], alone()[1], "what is logged")
    values = alone()[1]["seq_load_balancing_loss"]
    assert values.shape == (2,) and (values > 0.9 * 4).all() and (values < 2.0 * 4).all(), "four samples, of about 1 each"
    assert first_mismatch(values, values * 2)


class Parts(Training):
    """Recomputes expert layers alone."""

    def _fields(self):
        return super()._fields() | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def test_recomputing_a_part_of_a_layer_keeps_its_micro_batch(monkeypatch):
    """In a pipeline, later micro-batches have begun by then; here each is packed in its own way."""

    def main(rank, kind, cut):
        run = kind(replace(recipe(), samples=8), cut, Contract(grain=8))
        for _ in range(2):
            run.step()
        return run.sha256()

    cut = parse("pp2", packed=True, micro_batch=2)
    expected = set(run_ranks(1, main, Training, parse("tp1"), timeout=300))
    assert set(run_ranks(2, main, Parts, cut, timeout=300)) == expected
    monkeypatch.setattr(micro_batches, "resume", lambda batch: None)
    assert set(run_ranks(2, main, Parts, cut, timeout=300)) != expected


def test_the_log_adds_up_over_the_ranks_of_a_sample():
    """Stock adds the logged values over tensor- and context-parallel ranks."""
    parts = [logged["seq_load_balancing_loss"] for _, logged in run_ranks(2, train, recipe(), parse("tp2+ep2"), timeout=300)]
    assert_same_bytes(sum(parts), alone()[1]["seq_load_balancing_loss"])


def test_weighted_losses_have_nothing_to_divide_it_by():
    def main(rank):
        run = Training(recipe(), parse("tp1"), Contract())
        run.megatron.finalize_model_grads_func = finalize_weighted_grads
        run.step()

    with pytest.raises(RankError, match="finalize_weighted_grads: seq_aux_loss is divided by the tokens of the batch; use finalize_model_grads"):
        run_ranks(1, main, timeout=300)

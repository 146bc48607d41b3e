"""Random weights drawn on the CPU are one model's in every layout; pipeline stages, which seed generators of their own, are left out."""

import contextlib
import functools

import pytest
import torch
from moe_models import Row
from tiny_megatron import running

from tio_megatron.checkpoint import Checkpoint
from tio_megatron.integrations.megatron.weights import random_weights
from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
from tio_megatron.integrations.megatron.weights.transfer import export_weights
from tio_megatron.testing import assert_same_bytes, run_ranks

DRAWN = {"use_cpu_initialization": True, "perform_initialization": True}


def drawn(rank, row, plant=None):
    """Every tensor, whole, on rank 0; built as a training script does: one seed for all ranks, the vocabulary padded by the layout."""
    setup = row.setup(**DRAWN)
    with running(setup), Checkpoint(setup.path) as checkpoint, planted(plant):
        torch.manual_seed(7)
        config = transformer_config(checkpoint.config, setup.layout, **setup.fields)
        model = gpt_model(checkpoint.config, config, vocab_size=padded_vocab(checkpoint.config, setup.layout))
        return {name: value.clone() for name, value in export_weights(model, checkpoint.config) if value is not None}


@contextlib.contextmanager
def planted(name):
    """On a rank: one of the two repairs taken out, as stock draws."""
    if name is None:
        yield
        return
    from tio_megatron.integrations.megatron.modules import experts as moe_experts

    place = {"among_all_experts": moe_experts, "true_rows": random_weights}[name]
    ours = getattr(place, name)
    setattr(place, name, lambda *_: contextlib.nullcontext())
    try:
        yield
    finally:
        setattr(place, name, ours)


@functools.cache
def alone(grouped):
    return run_ranks(1, drawn, Row(grouped=grouped))[0]


def table():
    for grouped in (True, False):
        # 700 rows become 768 for TP 1 and 2, 1024 for TP 4.
        for sizes in ({"ep": 2}, {"tp": 2, "etp": 2}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}):
            row = Row(**sizes, grouped=grouped)
            full = row.world == 4 and not grouped or sizes == {"tp": 2, "etp": 2} and grouped
            yield pytest.param(row, id=str(row), marks=[pytest.mark.full] if full else [])


@pytest.mark.parametrize("row", list(table()))
def test_every_layout_starts_from_the_same(row):
    found = run_ranks(row.world, drawn, row)[0]
    assert_same_bytes(found, alone(row.grouped), str(row))
    experts = [value for name, value in found.items() if name.endswith("gate_proj.weight")]
    assert len(experts) > row.ep and all(not torch.equal(a, b) for i, a in enumerate(experts) for b in experts[:i]), "no expert is another's copy"


@pytest.mark.parametrize("row, plant", [(Row(ep=2), "among_all_experts"), (Row(ep=2, grouped=False), "among_all_experts"), (Row(tp=4, ep=4), "true_rows")])
def test_control_without_each_repair_they_differ(row, plant):
    with pytest.raises(AssertionError):
        assert_same_bytes(run_ranks(row.world, drawn, row, plant)[0], alone(row.grouped))


def test_the_configuration_is_as_it_was_afterwards_and_after_an_error():
    setup = Row().setup(**DRAWN)
    with Checkpoint(setup.path) as checkpoint:
        config = transformer_config(checkpoint.config, setup.layout, **setup.fields)
    before = config.embedding_init_method
    with pytest.raises(RuntimeError, match="within"), random_weights.true_rows(config, 768, 700):
        assert config.embedding_init_method is not before
        raise RuntimeError("within")
    assert config.embedding_init_method is before

"""Experts' gradients have one rank's bytes where a block of ranks that share samples straddles the ranks over which experts are cut.

All sizes up to 16 ranks are decided in a simulated world with the groups of Megatron's own generator; a few of them run.
"""

import functools
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron.core.parallel_state import RankGenerator

from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.layers.grains import MicroBatch, grain_of
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

HELD = tempfile.TemporaryDirectory(prefix="tio-any-sizes-")


@pytest.fixture(scope="module", autouse=True)
def model():
    """Written before ranks start: they must not each write it."""
    write_tiny(Path(HELD.name) / "model", MOE, num_hidden_layers=1, num_experts=12, torch_dtype="float32")


def train(rank, words):
    run = Training(Recipe(Path(HELD.name) / "model", steps=1, samples=6), parse(words), Contract())
    run.step()
    digest = run.sha256()
    run.close()
    return digest


@functools.cache
def digests(words):
    return set(run_ranks(parse(words).layout.ranks, train, words, timeout=600))


@pytest.mark.parametrize(
    "words",
    [
        "tp2+dp3+ep3",
        "cp3+dp2+ep2+etp1",
        pytest.param("dp6+ep3", marks=pytest.mark.full),
        pytest.param("cp2+dp3+ep3+etp1", marks=pytest.mark.full),
        pytest.param("tp2+dp3+ep3+allgather", marks=pytest.mark.full),
        pytest.param("tp2+cp3+dp2+ep4+etp1", marks=pytest.mark.full),
    ],
)
def test_one_step_has_one_ranks_bytes(words):
    assert digests(words) == digests("tp1")


@dataclass(frozen=True)
class Group:
    """A process group that only says its size and this rank's place."""

    ranks: int
    place: int

    def size(self):
        return self.ranks

    def rank(self):
        return self.place


GRAIN = 5
"""Positions. Two packed samples of 2 * TP * CP and 4 * TP * CP positions have grains that lie on one rank, and grains that ranks cut."""


@functools.cache
def own_rows(tp, cp, experts_over, replica, tensor, context):
    """Grain and owner of a rank's rows, and whether the rank asks for owners at all."""
    starts, length = torch.tensor([0, 2 * tp * cp, 6 * tp * cp]), 6 * tp
    groups = {"tensor": Group(tp, tensor), "context": Group(cp, context), "block": Group(tp * cp, context * tp + tensor)}
    batch = MicroBatch(Sequences(starts, context, cp), GRAIN, replica=replica, experts_over=experts_over, **groups)
    grains = grain_of(batch.labels(length, 1, tp, tensor), GRAIN).tolist()
    owners = batch.owners(length, 1, tp, tensor).tolist() if batch.straddles else [None] * len(grains)
    return set(zip(grains, owners, strict=True)), batch.straddles


def worlds():
    """Every (TP, CP, DP, EP, ETP, PP) of up to 16 ranks that Megatron takes, with both of its scripts' orders of ranks."""
    sizes = range(1, 17)
    for pp in (1, 2):
        for tp, cp, dp in ((tp, cp, dp) for tp in sizes for cp in sizes for dp in sizes if tp * cp * dp * pp <= 16):
            stage = tp * cp * dp
            for ep, etp in ((ep, etp) for ep in sizes for etp in sizes if stage % (ep * etp) == 0):
                for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")[:pp]:
                    dense, experts = RankGenerator(tp, 1, dp, pp, cp, order), RankGenerator(etp, ep, stage // (ep * etp), pp, 1, order)
                    if dense.get_ranks("pp") == experts.get_ranks("pp"):  # Megatron asserts it
                        yield (tp, cp, dp, ep, etp, pp, order), dense, experts


def simulate(sizes, dense, experts):
    """Where the rows of each (stage, part of an expert, grain) end: ``owned`` by our rule, and the blocks over which the rule of old gathered them."""
    tp, cp, _, ep, etp, pp, _ = sizes
    of = lambda generator, name: {rank: tuple(ranks) for ranks in generator.get_ranks(name) for rank in ranks}  # noqa: E731
    tensor, context, data, block, stages = (of(dense, name) for name in ("tp", "cp", "dp", "tp-cp", "pp"))
    dispatch, copies = of(experts, "tp-ep"), of(experts, "dp")
    owned, gathered, straddles = defaultdict(set), defaultdict(set), set()
    for me in range(dense.world_size):
        rows, exchanges = own_rows(tp, cp, ep * etp, *(ranks[me].index(me) for ranks in (data, tensor, context)))
        straddles.add(exchanges)
        for grain, owner in rows:
            for place, at in enumerate(dispatch[me]):
                part = stages[me].index(me), place, grain
                owned[part].add(at if owner is None else copies[at][owner])
                gathered[part].add(block[at])
    assert len(straddles) == 1, "all ranks take part in the exchange, or none"
    return owned, gathered


def test_each_grain_of_an_expert_has_one_owner_in_every_world():
    wrong_of_old, neither_divides = set(), set()
    for sizes, dense, experts in worlds():
        owned, gathered = simulate(sizes, dense, experts)
        assert all(len(ranks) == 1 for ranks in owned.values()), sizes
        tp, cp, _, ep, etp, *_ = sizes
        if ep * etp % (tp * cp) and tp * cp % (ep * etp):
            neither_divides.add(sizes)
            if any(len(blocks) > 1 for blocks in gathered.values()):  # the plant: rows gathered over the block alone, as it was
                wrong_of_old.add(sizes)
    assert wrong_of_old == neither_divides and (2, 1, 3, 3, 1, 1, "tp-cp-ep-dp-pp") in wrong_of_old

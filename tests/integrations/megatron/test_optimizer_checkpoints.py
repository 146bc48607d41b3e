"""What the optimizer saves is all it needs: the step after loading has the bytes of an uninterrupted run, in another layout too."""

import copy

import pytest
from hand_made import Row, everything, made, step
from megatron.core import dist_checkpointing
from tiny_megatron import running

from tio_megatron.testing import assert_same_bytes, run_ranks

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, "distrib_optim_fully_reshardable_mem_efficient": False}
STEPS = 2


def state_of(model, optimizer, is_loading=False):
    weights = model.module.sharded_state_dict()
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA)}


def save(rank, row, path):
    with running(row.setup):
        model, optimizer = made(row)
        for seed in range(STEPS):
            step(model, optimizer, row, seed)
        dist_checkpointing.save(state_of(model, optimizer), path)
        step(model, optimizer, row, STEPS)
        return everything(model, optimizer, row)


def load(rank, row, path):
    with running(row.setup):
        model, optimizer = made(row)
        found = dist_checkpointing.load(state_of(model, optimizer, is_loading=True), path)
        model.module.load_state_dict(found["model"], strict=False)
        optimizer.load_state_dict(found["optimizer"])
        assert {group["step"] for group in optimizer.param_groups} == {STEPS}
        step(model, optimizer, row, STEPS)
        return everything(model, optimizer, row)


@pytest.mark.parametrize(
    "saved, loaded",
    [
        pytest.param(Row(tp=2, ep=2), Row(), marks=pytest.mark.full),
        (Row(tp=2, ep=2, sharded=True), Row(dp=2, sharded=True)),
        pytest.param(Row(dp=2, ep=2, dtype="float32"), Row(tp=2, dtype="float32"), marks=pytest.mark.full),
        pytest.param(Row(pp=2, dp=2, sharded=True), Row(ep=2, dp=2, sharded=True), marks=pytest.mark.full),
        pytest.param(Row(tp=2, ep=2, dp=2, sharded=True), Row(sharded=True), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_another_layout_goes_on(saved, loaded, tmp_path):
    wanted = run_ranks(saved.world, save, saved, tmp_path, timeout=200)[0]
    found = run_ranks(loaded.world, load, loaded, tmp_path, timeout=200)[0]
    assert_same_bytes(found, wanted)


def interrupted(rank, row, folder):
    """Everything after a third step: of a run, and of another that took over its state after the second."""
    with running(row.setup):
        model, optimizer = made(row)
        again, resumed = made(row)
        for seed in range(STEPS):
            step(model, optimizer, row, seed)
        kept = copy.deepcopy(optimizer.state_dict())
        again.module.load_state_dict(model.module.state_dict())
        resumed.load_state_dict(kept)
        if row.sharded:
            optimizer.save_parameter_state(folder / f"{rank}.pt")
            resumed.load_parameter_state(folder / f"{rank}.pt")
        results = []
        for each in ((model, optimizer), (again, resumed)):
            assert step(*each, row, STEPS)[0]
            results.append(everything(*each, row))
        return results


@pytest.mark.parametrize("row", [Row(dp=2, ep=2), Row(dp=2, ep=2, sharded=True), Row(dtype="float32")], ids=str)
def test_the_plain_state_goes_out_and_in(row, tmp_path):
    wanted, found = run_ranks(row.world, interrupted, row, tmp_path, timeout=200)[0]
    assert_same_bytes(found, wanted)

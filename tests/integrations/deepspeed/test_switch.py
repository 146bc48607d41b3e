"""Switching it on and off: what is patched is given back, other versions and other plug-ins are named, gradients are right. Needs DeepSpeed."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed", reason="NOT RUN: deepspeed is not installed here: make test-deepspeed")

from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject.layers import LinearAllreduce
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed_runs import HIDDEN, Dense, Layout, Model, batches, build, configuration, here, initialize, train
from loud import skip_loudly

import tio_megatron as tio
from tio_megatron.integrations.deepspeed.patches import deepspeed_patches
from tio_megatron.integrations.megatron.applied.state import patched, problems
from tio_megatron.testing import assert_same_bytes, run_ranks
from tio_megatron.testing.ranks import RankError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    tio.undo()


def symbols():
    found = {}
    for patch in deepspeed_patches():
        owner, name = patch.owner()
        found[patch.target] = vars(owner)[name]
    return found


def test_undo_gives_every_symbol_back():
    before = symbols()
    with tio.apply():
        ours = symbols()
        assert all(ours[target] is not before[target] for target in before)
        assert set(before) <= set(patched()["symbols"]) and problems() == []
    after = symbols()
    assert all(after[target] is before[target] for target in before)


def test_deepspeed_imported_later_is_patched_then():
    """In a fresh process, from the environment alone."""
    code = (
        "import tio_megatron.auto, sys; assert 'deepspeed' not in sys.modules\n"
        "import deepspeed\n"
        "from deepspeed.moe.sharded_moe import MOELayer\n"
        "assert MOELayer.forward.__globals__['__name__'].startswith('tio_megatron.')\n"
        "import tio_megatron; tio_megatron.undo()\n"
        "assert MOELayer.forward.__globals__['__name__'].startswith('deepspeed.')\n"
        "print('done')"
    )
    environment = os.environ | {"TIO_CONTRACT": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, cwd="/", timeout=200)
    assert done.stdout.strip().endswith("done"), done.stderr[-3000:]


def test_another_version_is_named(monkeypatch):
    version = importlib.metadata.version
    before = symbols()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.1" if name == "deepspeed" else version(name))
    with pytest.raises(ImportError, match=r"deepspeed 0\.20\.1 is installed; tio_megatron supports deepspeed 0\.19\.8"):
        tio.apply()
    assert symbols() == before


def late_patch(rank):
    here(rank, 1)
    tio.apply()
    theirs = lambda self, input: input  # noqa: E731, A002
    theirs.__globals__["__name__"] = "other_plugin"
    LinearAllreduce.forward = theirs
    initialize(rank, Layout())


def test_a_plug_in_that_patches_after_us_is_named():
    with pytest.raises(RankError, match=r"LinearAllreduce\.forward: replaced by somebody else after tio_megatron.*; apply tio_megatron last"):
        run_ranks(1, late_patch)


def missing(rank):
    os.environ["TIO_START_SECONDS"] = "3"
    initialize(rank, Layout(world=2, ours=rank == 0))


def test_a_rank_without_the_plug_in_is_named():
    with pytest.raises(RankError, match="rank 1: tio_megatron did not load there"):
        run_ranks(2, missing)


def after_undo(rank):
    engine, _ = initialize(rank, Layout())
    tio.undo()
    batch = batches(1)[0, 0]
    engine(batch)


def test_an_engine_does_not_run_after_undo():
    with pytest.raises(RankError, match="built under a contract that is not in force any more"):
        run_ranks(1, after_undo)


def gradients(rank, layout):
    """Of the first step, before the optimizer: ZeRO-0 leaves them on the parameters."""
    engine, model = initialize(rank, layout)
    found = {}
    engine.optimizer.register_step_pre_hook(lambda *_: found.update({name: p.grad.clone() for name, p in model.named_parameters()}))
    train(rank, layout, engine, batches(1))
    return found


@pytest.mark.parametrize("ep, k", [(0, 2), (1, 1), (1, 2), (1, 3)])  # a dense model has no choices
def test_gradients_are_stock_s_but_for_roundings(ep, k):
    layout = Layout(stage=0, ep=ep, k=k, clip=0.0)
    ours, stock = (run_ranks(1, gradients, layout._replace(ours=on))[0] for on in (True, False))
    assert set(ours) == set(stock)
    for name, value in stock.items():
        assert float((ours[name] - value).abs().max()) <= 2e-5 * float(value.abs().max()) + 1e-8, name


def resumed(rank, layout, folder):
    """Two steps, a checkpoint, two more; and the last two again from the checkpoint, in a new engine."""
    data = batches(4)
    engine, model = initialize(rank, layout)
    train(rank, layout, engine, data[:2])
    engine.save_checkpoint(folder, client_state={"mine": 5})
    straight = train(rank, layout, engine, data[2:])
    again, other = initialize(rank, layout)
    _, client_state = again.load_checkpoint(folder)
    assert client_state["mine"] == 5 and not any(name.startswith("tio") for name in client_state)
    broken = train(rank, layout, again, data[2:])
    pairs = {name: (p, dict(other.named_parameters())[name]) for name, p in model.named_parameters()}
    return [(name, straight[name], broken[name]) for name in straight] + [(name, a.detach().clone(), b.detach().clone()) for name, (a, b) in pairs.items()]


BESIDE = [Layout(world=2, tp=2, ep=2), Layout(world=2, tp=2, ep=1, cut=True), Layout(world=4, tp=2, ep=2), Layout(world=4, tp=2, ep=2, cut=True)]
"""An MoE layer beside tensor parallelism."""
KEPT = [Layout(world=2, stage=2), Layout(world=2, ep=2, stage=1), *(pytest.param(layout, marks=pytest.mark.full) for layout in BESIDE)]


@pytest.mark.parametrize("layout", KEPT, ids=str)
def test_a_checkpoint_goes_on_with_the_same_bytes(layout, tmp_path):
    for theirs in run_ranks(layout.world, resumed, layout, str(tmp_path), timeout=200):
        for name, straight, broken in theirs:
            assert_same_bytes(broken, straight, name)


def skipped(rank, layout, spoil):
    """Three steps; with ``spoil`` a fourth between them whose last micro-batch gives NaN, refused on all ranks, and the run goes on."""
    data = batches(3)
    engine, model = initialize(rank, layout)
    train(rank, layout, engine, data[:1])
    if spoil:
        bad = torch.tensor([float("nan") if rank == 0 else 1.0])
        for number in range(engine.gradient_accumulation_steps()):
            loss = engine(data[1, number][:, :-1]).float().square().mean()
            last = number + 1 == engine.gradient_accumulation_steps()
            if last:
                with pytest.raises(ArithmeticError, match="NaN or infinite.*Nothing was changed"):
                    engine.backward(loss * bad.squeeze())
            else:
                engine.backward(loss)
                engine.step()
    train(rank, layout, engine, data[1:])
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_run_goes_on_after_a_bad_gradient(stage):
    clean, spoiled = (run_ranks(2, skipped, Layout(world=2, stage=stage), spoil, timeout=200)[0] for spoil in (False, True))
    for name, value in clean.items():
        assert_same_bytes(spoiled[name], value, name)


def rebuilt(rank, twice):
    """Two engines on one model, one after the other: the second's sums get the gradients."""
    import deepspeed

    layout = Layout()
    engine, model = initialize(rank, layout)
    if twice:
        engine, *_ = deepspeed.initialize(model=model, config=configuration(layout))
    train(rank, layout, engine, batches(1))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_second_engine_on_the_same_model():
    once, again = (run_ranks(1, rebuilt, twice)[0] for twice in (False, True))
    for name, value in once.items():
        assert_same_bytes(again[name], value, name)


def test_stock_classes_are_untouched_outside_apply():
    for cls, name in ((DeepSpeedEngine, "backward"), (MOELayer, "forward"), (InferenceEngine, "__init__")):
        assert not getattr(vars(cls)[name], "__globals__", {"__name__": ""})["__name__"].startswith("tio_megatron")
    assert isinstance(Dense().up_proj, torch.nn.Linear) and Dense().up_proj.in_features == HIDDEN
    assert configuration(Layout())["zero_optimization"] == {"stage": 1} and isinstance(build(0, Layout()), Model)


def test_beside_megatron_core():
    """Both packages in one process: one apply() and one undo() for both. ``make test-deepspeed`` brings a megatron-core in a folder of its own."""
    folder = os.environ.get("MEGATRON_CORE")
    if not folder:
        skip_loudly("MEGATRON_CORE is not set: make test-deepspeed")
    code = (
        "import deepspeed, megatron.core\n"
        "import tio_megatron as tio\n"
        "from tio_megatron.integrations.megatron.applied.state import patched, problems\n"
        "tio.apply()\n"
        "owners = {name.partition('.')[0] for name in patched()['symbols']}\n"
        "assert owners == {'deepspeed', 'megatron'} and problems() == [], (owners, problems())\n"
        "tio.undo()\n"
        "assert patched()['symbols'] == []\n"
        "print('done')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), folder])}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, cwd="/", timeout=200)
    assert done.stdout.strip().endswith("done"), done.stderr[-3000:]

"""One training run in every layout: logits, norms and weights have the bytes of one process; stock's do not. Needs DeepSpeed: make test-deepspeed."""

import pytest

pytest.importorskip("deepspeed", reason="NOT RUN: deepspeed is not installed here: make test-deepspeed")

from deepspeed_runs import Layout, batches, initialize, joined, train, train_all, weights

from tio_megatron.testing import assert_same_bytes, run_ranks

ALONE = Layout()
DENSE = [Layout(world=world, tp=tp) for world, tp in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))]
SPARSE = [Layout(world=world, ep=ep) for world, ep in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))]
STAGES = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 1, "bf16": True}, {"stage": 2, "bf16": True}]


def rows(layout: Layout) -> list[Layout]:
    """A layout in every ZeRO stage and type."""
    return [layout._replace(**stage) for stage in STAGES]


def run(layouts: list[Layout]):
    world = layouts[0].world
    ranks = run_ranks(world, train_all, layouts, timeout=400)
    return [joined([theirs[i] for theirs in ranks]) for i in range(len(layouts))]


@pytest.fixture(scope="module")
def dense_alone():
    return run(rows(ALONE))


@pytest.fixture(scope="module")
def sparse_alone():
    return run(rows(ALONE._replace(ep=1)))


def assert_equal(found, expected, layouts):
    for layout, theirs, ours in zip(layouts, found, expected, strict=True):
        # ZeRO-0 has no norm to tell, and a rank of a TP group the same logits as the others
        names = sorted(set(ours) & set(theirs))
        assert len(names) > 30 and set(theirs) <= set(ours), sorted(set(theirs) ^ set(ours))
        for name in names:
            assert_same_bytes(theirs[name], ours[name], f"{layout}: {name}")


def test_zero_stages_have_one_result(dense_alone, sparse_alone):
    for alone in (dense_alone, sparse_alone):
        assert_equal([alone[1], alone[2], alone[4]], [alone[1], alone[1], alone[3]], [ALONE] * 3)
        for name, value in alone[0].items():
            assert_same_bytes(value, alone[1][name], f"ZeRO-0 {name}")


@pytest.mark.parametrize("layout", DENSE[1:], ids=str)
def test_dense(layout, dense_alone):
    assert_equal(run(rows(layout)), dense_alone, rows(layout))


@pytest.mark.parametrize("layout", SPARSE[1:], ids=str)
def test_experts(layout, sparse_alone):
    assert_equal(run(rows(layout)), sparse_alone, rows(layout))


@pytest.mark.parametrize("k", [1, 3])
def test_other_numbers_of_choices(k):
    alone = run([ALONE._replace(ep=1, k=k)])
    for layout in (Layout(world=4, ep=2, k=k), Layout(world=2, ep=2, k=k)):
        assert_equal(run([layout]), alone, [layout])


def copied(rank, layout):
    """Experts as DeepSpeed makes them, all alike: the gate's first gradients are roundings."""
    engine, model = initialize(rank, layout, keep=True)
    return train(rank, layout, engine, batches(3)) | weights(rank, layout, model)


def test_experts_that_start_alike():
    alone, found = (joined(run_ranks(layout.world, copied, layout, timeout=200)) for layout in (Layout(ep=1), Layout(world=2, ep=2)))
    for name, value in alone.items():
        assert_same_bytes(found[name], value, name)


@pytest.mark.parametrize("layout", [Layout(world=2), Layout(world=2, tp=2), Layout(world=2, ep=2)], ids=str)
def test_stock_differs(layout):
    """The control: the same model, batches and layouts without the contract."""
    layout = layout._replace(ours=False, steps=1)
    alone = run([layout._replace(world=1, tp=1, ep=min(layout.ep, 1))])[0]
    found = run([layout])[0]
    differ = [name for name, value in alone.items() if value.numpy().tobytes() != found[name].numpy().tobytes()]
    assert differ, f"{layout}: stock gives the same bytes, so this table proves nothing"


def test_the_steps_move_the_weights(dense_alone, sparse_alone):
    for alone in (dense_alone[1], sparse_alone[1]):
        assert alone["logits 0 0"].numpy().tobytes() != alone["logits 2 0"].numpy().tobytes()
        assert all(alone[f"norm {step}"] > 0.5 for step in range(3)), "clipping is at work"

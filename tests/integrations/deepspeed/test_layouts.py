"""One training run in every layout: logits, norms and weights have the bytes of one process; stock's do not. Needs DeepSpeed: make test-deepspeed."""

import pytest

pytest.importorskip("deepspeed", reason="NOT RUN: deepspeed is not installed here: make test-deepspeed")

import deepspeed
import torch
from deepspeed_runs import HIDDEN, Layout, Sparse, batches, build, configuration, here, initialize, joined, train, train_all, weights

import tio_megatron as tio
from tio_megatron.testing import assert_same_bytes, run_ranks

ALONE = Layout()
DENSE = [Layout(world=world, tp=tp) for world, tp in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))]
SPARSE = [Layout(world=world, ep=ep) for world, ep in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))]
BESIDE = [  # tensor parallelism; the first is the fast one
    Layout(world=2, tp=2, ep=2),
    Layout(world=2, tp=2, ep=1),
    Layout(world=2, tp=2, ep=1, cut=True),
    Layout(world=4, tp=2, ep=1),
    Layout(world=4, tp=2, ep=1, cut=True),
    Layout(world=4, tp=2, ep=2),
    Layout(world=4, tp=2, ep=2, cut=True),
    Layout(world=4, tp=2, ep=4),
    Layout(world=4, tp=4, ep=4),
]
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


def test_experts_beside_tensor_parallelism(sparse_alone):
    layout = BESIDE[0]
    assert_equal(run([layout]), sparse_alone[1:2], [layout])


@pytest.mark.full
@pytest.mark.parametrize("layout", BESIDE, ids=str)
def test_experts_beside_tensor_parallelism_in_every_stage(layout, sparse_alone):
    assert_equal(run(rows(layout)), sparse_alone, rows(layout))


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 3])
def test_other_numbers_of_choices_beside_tensor_parallelism(k):
    alone = run([ALONE._replace(ep=1, k=k)])
    for layout in (Layout(world=2, tp=2, ep=2, k=k), Layout(world=4, tp=2, ep=2, k=k, cut=True)):
        assert_equal(run([layout]), alone, [layout])


class Alone(Sparse):
    """An MoE layer alone, which is told which tokens are padding."""

    def forward(self, x, used):
        return self.moe(x, used)[0]


def odd(rank, layout):
    """Micro-batches of 5 tokens and of one, which do not divide by the ranks, the first with padding: results, and the gradients of the tokens."""
    here(rank, layout.world)
    tio.apply()
    engine, *_ = deepspeed.initialize(model=build(rank, layout, Alone), config=configuration(layout) | {"gradient_accumulation_steps": 2})
    found = {}
    for tokens in (5, 1):
        x = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).requires_grad_()
        used = torch.ones(1, tokens)
        used[0, 3:4] = 0
        out = engine(x, used)
        engine.backward(out.square().mean())
        engine.step()
        found |= {f"out {tokens}": out.detach().clone(), f"gradient {tokens}": x.grad.clone()}
    return found | weights(rank, layout, engine.module)


@pytest.mark.full
def test_tokens_that_do_not_divide():
    alone = joined(run_ranks(1, odd, Layout(ep=1, k=1), timeout=200))
    for layout in (Layout(world=2, tp=2, ep=2, k=1), Layout(world=2, tp=2, ep=1, k=1, cut=True)):
        found = joined(run_ranks(2, odd, layout, timeout=200))
        assert len(found) > 20 and set(found) == set(alone), sorted(set(found) ^ set(alone))
        for name, value in alone.items():
            assert_same_bytes(found[name], value, f"{layout}: {name}")


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


STOCK = [Layout(world=2), Layout(world=2, tp=2), Layout(world=2, ep=2), *(pytest.param(layout, marks=pytest.mark.full) for layout in BESIDE[:2])]
"""With experts that are cut stock stops where an expert's capacity is odd."""


def stock(rank, layouts):
    """DeepSpeed gathers shares of tokens into a flat buffer, which gloo takes from a flat tensor alone."""
    from deepspeed import comm

    gather = comm.all_gather_into_tensor
    comm.all_gather_into_tensor = lambda out, x, group=None: gather(out, x.reshape(-1) if out.dim() == 1 else x, group=group)
    return train_all(rank, layouts)


@pytest.mark.parametrize("layout", STOCK, ids=str)
def test_stock_differs(layout):
    """The control: the same model, batches and layouts without the contract."""
    layout = layout._replace(ours=False, steps=1)
    alone = run([layout._replace(world=1, tp=1, ep=min(layout.ep, 1), cut=False)])[0]
    found = joined([theirs[0] for theirs in run_ranks(layout.world, stock if layout.tp > 1 and layout.ep else train_all, [layout], timeout=400)])
    differ = [name for name, value in alone.items() if value.numpy().tobytes() != found[name].numpy().tobytes()]
    assert differ, f"{layout}: stock gives the same bytes, so this table proves nothing"


def test_the_steps_move_the_weights(dense_alone, sparse_alone):
    for alone in (dense_alone[1], sparse_alone[1]):
        assert alone["logits 0 0"].numpy().tobytes() != alone["logits 2 0"].numpy().tobytes()
        assert all(alone[f"norm {step}"] > 0.5 for step in range(3)), "clipping is at work"

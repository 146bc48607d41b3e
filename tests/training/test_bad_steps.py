"""A bad training step is one error, the same on every rank, within seconds; nothing has changed, and the run goes on as if it had not been."""

import contextlib
import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.qwen3_moe import training
from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron.training import grad_sums
from tio_megatron.integrations.megatron.training.grad_refusals import BadGradient
from tio_megatron.layers import gradient_sums
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

HELD = tempfile.TemporaryDirectory(prefix="tio-bad-steps-")
STEPS = 3


@functools.cache
def recipe():
    return Recipe(write_tiny(Path(HELD.name) / "model", MOE, hidden_size=64, num_attention_heads=4), STEPS, samples=4, shortest=6, longest=24, aux_loss=0.02)


@pytest.fixture(scope="module", autouse=True)
def model():
    """Written before ranks start: they must not each write it."""
    recipe()


@contextlib.contextmanager
def replaced(place, name, new):
    """``new`` as attribute ``name`` for the length of the block."""
    before = getattr(place, name)
    setattr(place, name, new)
    try:
        yield
    finally:
        setattr(place, name, before)


def schedule(change):
    """Training whose every ``(output, loss function)`` of the last rank goes through ``change``."""
    stock = training.get_forward_backward_func

    def changed():
        def run(*, forward_step_func, **more):
            def step(iterator, stage):
                output, loss = forward_step_func(iterator, stage)
                return change(output, loss, stage) if dist.get_rank() == dist.get_world_size() - 1 else (output, loss)

            return stock()(forward_step_func=step, **more)

        return run

    return replaced(training, "get_forward_backward_func", changed)


def everywhere(change):
    """The same on every rank."""
    stock = training.get_forward_backward_func

    def changed():
        return lambda *, forward_step_func, **more: stock()(forward_step_func=lambda *given: change(*forward_step_func(*given)), **more)

    return replaced(training, "get_forward_backward_func", changed)


def of_loss(change):
    return lambda output, loss, *_: (output, lambda per_token: change(*loss(per_token)))


def nan_loss():
    return schedule(of_loss(lambda total, tokens, report: (total * float("nan"), tokens, report)))


def infinite_expert():
    """In the sum of one expert's weight, on one rank."""
    stock = gradient_sums.add_products

    def spoiled(sums, dy, x, **more):
        if len(sums) > 1 and len(dy) and dist.get_rank() == dist.get_world_size() - 1:
            dy = dy.clone()
            dy[-1, 0] = float("inf")
        stock(sums, dy, x, **more)

    return replaced(gradient_sums, "add_products", spoiled)


def two_values():
    return schedule(of_loss(lambda total, tokens, report: (total, report)))


def no_tokens():
    return everywhere(of_loss(lambda total, tokens, report: (total * 0, tokens * 0, report)))


def foreign_layer():
    """The loss reads a weight behind our layers' back."""

    def change(output, loss, stage):
        weight = next(p for name, p in stage.named_parameters() if "router" in name)
        return output + 1e-3 * weight.float().sum().to(output.dtype), loss

    return schedule(change)


BAD = {
    "nan loss": (nan_loss, BadGradient, "NaN or infinite"),
    "infinite expert": (infinite_expert, BadGradient, r"rank \d: .*experts.*NaN or infinite"),
    "two values": (two_values, ValueError, r"losses of this step came without their number of tokens.*let the loss function return \(sum of the losses,"),
    "no tokens": (no_tokens, ValueError, "no token of this batch counts"),
    "foreign layer": (foreign_layer, RuntimeError, r"gradient through autograd, from a layer that is not ours.*router.weight"),
}


def remembered(run):
    return [p.largest for sums in grad_sums.sums_of([run.model]) for p in sums.parameters]


def train(rank, cut, bad):
    """Digest after ``STEPS`` good steps with bad ones after the first; the message of each."""
    run = Training(recipe(), cut, Contract(grain=8))
    run.step()
    messages = {}
    before = run.sha256(), remembered(run)
    if bad:
        with replaced(run.model, "zero_grad_buffer", lambda: None), pytest.raises(RuntimeError, match=r"call zero_grad_buffer\(\)") as caught:
            run.step()
        messages["twice"] = str(caught.value)
    for name in bad:
        make, kind, text = BAD[name]
        with make(), pytest.raises(kind, match=text) as caught:
            run.step()
        messages[name] = str(caught.value)
        assert (run.sha256(), remembered(run)) == before, name
    for _ in range(STEPS - 1):
        run.step()
    found = run.sha256(), messages
    run.close()
    return found


@functools.cache
def undisturbed():
    return run_ranks(1, train, parse("tp1"), (), timeout=300)[0][0]


@pytest.mark.parametrize(
    "cut",
    [
        parse("dp2", distributed_optimizer=True, overlap=True),
        parse("pp2", packed=True),
        parse("tp2+ep2", micro_batch=2, recompute=True),
        pytest.param(parse("tp1"), marks=pytest.mark.full),
        pytest.param(parse("ep2", distributed_optimizer=True), marks=pytest.mark.full),
        pytest.param(parse("cp2"), marks=pytest.mark.full),
        pytest.param(parse("pp2+dp2+ep2", distributed_optimizer=True), marks=pytest.mark.full),
        pytest.param(parse("tp2+dp2+ep2+etp2+allgather"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_rank_says_the_same_and_nothing_has_changed(cut):
    results = run_ranks(cut.layout.ranks, train, cut, tuple(BAD), timeout=300)
    assert [digest for digest, _ in results] == [undisturbed()] * len(results)
    messages = [messages for _, messages in results]
    assert messages == messages[:1] * len(messages) and set(messages[0]) == {*BAD, "twice"}


def test_a_bad_step_that_is_taken_changes_the_run():
    """What the digests are compared with does see a step."""

    def one_more(rank):
        run = Training(recipe(), parse("tp1"), Contract(grain=8))
        for _ in range(STEPS + 1):
            run.step()
        return run.sha256()

    assert run_ranks(1, one_more, timeout=300) != [undisturbed()]


@pytest.mark.parametrize("cut", [parse("ep4"), pytest.param(parse("tp4+ep4+allgather"), marks=pytest.mark.full)], ids=str)
def test_experts_and_ranks_without_tokens_are_ordinary(cut):
    """Samples of one or two tokens: most experts of a step see none, and so do ranks."""
    short = replace(recipe(), shortest=1, longest=2)

    def main(rank, how):
        run = Training(short, how, Contract(grain=8))
        for _ in range(2):
            run.step()
        return run.sha256()

    assert set(run_ranks(cut.layout.ranks, main, cut, timeout=300)) == set(run_ranks(1, main, parse("tp1"), timeout=300))


def test_a_batch_that_does_not_divide_is_refused_by_all():
    def main(rank):
        run = Training(recipe(), parse("dp2", micro_batch=3), Contract(grain=8))
        with pytest.raises(ValueError, match="a global batch of 4 samples does not divide by 2 data-parallel ranks times micro-batch 3"):
            run.step()

    run_ranks(2, main, timeout=300)


def given(**fields):
    """The schedule with other arguments; ``tokens`` changes what a micro-batch holds."""
    stock, tokens = training.get_forward_backward_func, fields.pop("tokens", None)

    def changed():
        def run(*, data_iterator, **more):
            parts = ({**part, "tokens": tokens(part["tokens"])} for part in data_iterator) if tokens else data_iterator
            return stock()(**{"data_iterator": parts, **more, **fields})

        return run

    return replaced(training, "get_forward_backward_func", changed)


EMPTY = {
    "no micro-batches": (dict(num_microbatches=0), "a training step of 0 micro-batches"),
    "no rows": (dict(tokens=lambda tokens: tokens[:0]), r"input_ids has shape \[0, \d+\], an empty batch"),
    "no positions": (dict(tokens=lambda tokens: tokens[:, :0]), r"input_ids has shape \[\d+, 0\], an empty batch"),
    "an iterator that ends early": (dict(data_iterator=iter(())), "the data iterator ended before the 2 micro-batches"),
}


def test_an_empty_batch_is_refused_by_all_and_nothing_has_changed():
    def main(rank):
        run = Training(recipe(), parse("dp2"), Contract(grain=8))
        run.step()
        before = run.sha256()
        for fields, text in EMPTY.values():
            with given(**fields), pytest.raises(ValueError, match=text):
                run.step()
            assert run.sha256() == before
        for _ in range(STEPS - 1):
            run.step()
        return run.sha256()

    assert run_ranks(2, main, timeout=300) == [undisturbed()] * 2


def test_a_recipe_without_samples_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        replace(recipe(), samples=0)

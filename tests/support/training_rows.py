"""Training runs of examples/qwen3_moe in a layout, with a wrong order planted on request. For tests only."""

import contextlib
import fcntl
import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.kernels.integer_sum import IntegerSum, add_products
from tio_megatron.layers import gradient_sums
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import DENSE, MOE, write_tiny

HELD = TemporaryDirectory(prefix="tio-training-")
SMALL = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32)
MODELS = {
    "moe": MOE | SMALL | dict(num_experts=16, num_experts_per_tok=4),
    "moe tied fp32": MOE | SMALL | dict(num_experts=12, num_experts_per_tok=3, tie_word_embeddings=True, torch_dtype="float32"),
    "dense tied": DENSE | SMALL | dict(tie_word_embeddings=True),
    "dense fp32": DENSE | SMALL | dict(torch_dtype="float32", vocab_size=2100),
}
CONTRACT = Contract(grain=32)


def folder(model):
    """The checkpoint, made by whoever asks first."""
    path = Path(HELD.name) / model.replace(" ", "-")
    with open(Path(HELD.name) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path if path.exists() else write_tiny(path, MODELS[model])


def trained(model, words, plant=None, steps=3, ordered=True, contract=CONTRACT, **cut):
    """Everything trained, by name, on rank 0; ranks must agree."""
    chosen = parse(words, **cut)
    results = run_ranks(chosen.layout.ranks, _rank, model, chosen, plant, steps, contract if ordered else None, timeout=300)
    assert all(digest == results[0][0] for digest, _ in results), "all ranks export the same"
    return results[0][1]


@functools.cache
def alone(model, steps=3, contract=CONTRACT):
    """One rank, one sample a micro-batch."""
    return trained(model, "tp1", steps=steps, contract=contract)


def _rank(rank, model, cut, plant, steps, contract):
    training = Training(Recipe(folder(model), steps=steps, warmup=1, lr=5e-3), cut, contract)
    with PLANTS[plant]() if plant else contextlib.nullcontext():
        for _ in range(steps):
            training.step()
    digest, state = training.sha256(), {name: tensor.clone() for name, tensor in training.state()}  # every rank moves its part
    training.close()
    return digest, state if rank == 0 else None


@contextlib.contextmanager
def fp32_sums():
    """Partials added one after another in fp32, as they come, and only the total in integers: what a gradient buffer of fp32 does."""
    running = {}

    def added(sums, dy, x, *, starts, of, order=None):
        for number, total in enumerate(sums):
            first, last = int(of[number]), int(of[number + 1])
            if first == last:
                continue
            for grain in range(first, last):
                one = IntegerSum.empty(total.low.shape, unit=total.unit, split=total.split)
                add_products([one], dy, x, starts=starts[grain : grain + 2], of=torch.tensor([0, 1]), order=order)
                part = one.low.double() * 2.0**one.unit + one.high.double() * 2.0 ** (one.unit + one.split - 24)
                key = total.low.data_ptr()
                before = running.get(key) if bool(total.low.any()) else None
                running[key] = part.float() if before is None else before + part.float()
                torch.maximum(total.peak, one.peak, out=total.peak)
            total.low.copy_((running[key].double() * 2.0**-total.unit).round().to(torch.int64))

    stock, gradient_sums.add_products = gradient_sums.add_products, added
    try:
        yield
    finally:
        gradient_sums.add_products = stock


@contextlib.contextmanager
def one_grain():
    """All rows that this rank sees at once as one partial, whatever samples they are of."""

    def added(sums, dy, x, *, starts, of, order=None):
        edges = starts[of]
        add_products(sums, dy, x, starts=edges, of=torch.arange(len(edges)), order=order)

    stock, gradient_sums.add_products = gradient_sums.add_products, added
    try:
        yield
    finally:
        gradient_sums.add_products = stock


PLANTS = {"fp32 sums": fp32_sums, "one grain": one_grain}

"""What goes wrong in the field, on whole models: importance ratios of a re-computation, and embeddings that are the head too."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from tiny_megatron import Setup, losses, on_ranks

from tio_megatron.checkpoint import Checkpoint, write_checkpoint
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.kernels import linear as products
from tio_megatron.layers import vocab
from tio_megatron.rl import token_ratio
from tio_megatron.testing import assert_same_bytes, first_mismatch
from tio_megatron.testing.qwen3 import DENSE, MOE, ragged, write_tiny

MICRO_BATCHES = (1, 2, 4)
SAMPLES = {"alike": ragged((97,) * 4, seed=5), "ragged": ragged((170, 30, 65, 97), seed=6)}


def recomputed(model, _):
    """By name: the scores of one sample after another (the rollout), and those that a trainer recomputes in micro-batches, by their kind."""
    found = {}
    for name, samples in SAMPLES.items():
        old = [token_logprobs(model, [sample]).logprobs[0] for sample in samples]
        new = {}
        for size in MICRO_BATCHES:
            new[f"{size}"] = token_logprobs(model, samples, batch=size).logprobs
            new[f"{size}, packed"] = token_logprobs(model, samples, batch=size, packed=True).logprobs
            if name == "alike":
                new[f"{size}, in the training step"] = list(-losses(model, torch.tensor(samples).split(size)))
        found[name] = old, new
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_case_14_the_first_ratio_is_one_for_any_micro_batch(tmp_path, monkeypatch, dtype):
    """The control is a library that picks the blocks of a product by its number of rows."""
    setup = Setup(write_tiny(tmp_path / "model", MOE, torch_dtype=dtype))
    for name, (old, ways) in on_ranks(setup, recomputed)[0].items():
        for way, new in ways.items():
            assert_same_bytes(new, old, f"{name}, micro-batch {way}")
            for after, before in zip(new, old, strict=True):
                assert_same_bytes(token_ratio(after, before), torch.ones_like(before), "ratio")
                assert bool((torch.exp(after - before) == 1.0).all())

    product = products.linear

    def by_rows(x, w, *, leaves, out_dtype=None):
        return product(x, w, leaves=1 if x.numel() // x.shape[-1] > 180 else leaves, out_dtype=out_dtype)

    monkeypatch.setattr(products, "linear", by_rows)
    for name, (old, ways) in on_ranks(setup, recomputed)[0].items():
        assert_same_bytes(ways["1"], old, f"{name}: few rows")
        for way in ("4", "4, packed", "2", "2, packed")[: 4 if name == "alike" else 2]:
            assert any(bool((token_ratio(after, before) != 1.0).any()) for after, before in zip(ways[way], old, strict=True)), f"{name}, {way}"


TIED = ragged((70, 33), seed=7)
CHANGE = 1 + torch.randn(700, DENSE["hidden_size"], generator=torch.Generator().manual_seed(3)) / 16


def before_and_after(model, heads):
    """By name of each head: scores with the first weights, and after embedding and head have changed in place, as an optimizer or a push changes them.

    ``heads``: product of the head, made anew from a function that gives the main weight in fp32, before it was rounded.
    """
    untied = [] if model.share_embeddings_and_output_weights else [model.output_layer.weight]
    weights = [model.embedding.word_embeddings.weight, *untied]
    found = {}

    def scores():
        scored = token_logprobs(model, TIED, rows=[[0, 50], [12]])
        return scored.logprobs + scored.rows

    first = weights[0].detach().clone()
    for name, make in heads.items():
        main = first.float()
        with vocab_head(make(lambda: main)), torch.no_grad():  # noqa: B023  (called while this one is in place)
            before = scores()
            main[:700] *= CHANGE
            for weight in weights:
                weight.copy_(main)
            found[name] = before, scores()
            for weight in weights:
                weight.copy_(first)
    return found


@contextlib.contextmanager
def vocab_head(product):
    """The product of the output layer replaced."""
    kernel = vocab.linear_kernel
    vocab.linear_kernel = SimpleNamespace(**vars(kernel) | {"linear": product})
    try:
        yield
    finally:
        vocab.linear_kernel = kernel


def on_the_fly(main):
    return products.linear


def cast_for_each_use(main):
    return lambda x, w, **options: products.linear(x.float(), w.float(), **options)


def cast_once(main):
    kept = {}
    return lambda x, w, **options: products.linear(x.float(), kept.setdefault("w", w.float()), **options)


def never_rounded(main):
    return lambda x, w, **options: products.linear(x.float(), main(), **options)


def test_case_19_an_fp32_head_on_a_tied_bf16_embedding(tmp_path):
    """When the head casts the shared weight does not matter, since a bf16 number is an fp32 number; what it casts does.

    Wrong heads: one keeps the copy that it cast first, though the weight has changed since; one reads the main weight, which was never rounded to
    the embedding's bf16. The untied model holds the same rows twice.
    """
    tied = write_tiny(tmp_path / "tied", DENSE, tie_word_embeddings=True)
    with Checkpoint(tied) as checkpoint:
        tensors = dict(checkpoint.tensors())
        twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        write_checkpoint(tmp_path / "untied", dict(checkpoint.config.raw) | {"tie_word_embeddings": False}, twice.items())
    heads = {form.__name__: form for form in (on_the_fly, cast_for_each_use, cast_once, never_rounded)}
    found = on_ranks(Setup(tied), lambda model, _: before_and_after(model, heads))[0]
    first, second = on_ranks(Setup(tmp_path / "untied"), lambda model, _: before_and_after(model, {"untied": on_the_fly}))[0]["untied"]
    assert first_mismatch(first, second) is not None
    for name, (before, after) in found.items():
        assert_same_bytes(before, first, name)
        if name in ("on_the_fly", "cast_for_each_use"):
            assert_same_bytes(after, second, name)
        else:
            assert first_mismatch(after, second) is not None, name

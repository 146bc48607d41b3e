"""Whole models against transformers: log-probabilities in fp32, gradients against float64, in several layouts."""

from functools import cache

import pytest
import torch
from tiny_megatron import Setup, ddp, gradients, losses, on_ranks

from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.testing.qwen3 import DENSE, MOE, ragged, write_tiny

transformers = pytest.importorskip("transformers")
KINDS = {
    "dense": (DENSE, dict()),
    "dense tied, 2 groups": (DENSE, dict(tie_word_embeddings=True, num_key_value_heads=2)),
    "moe": (MOE, dict()),
    "moe not renormalised": (MOE, dict(norm_topk_prob=False)),
}
SEQUENCES = ragged()
TOKENS = torch.randint(700, (4, 81), generator=torch.Generator().manual_seed(3))
WEIGHT = 1 / TOKENS[:, 1:].numel()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("accuracy")

    @cache
    def written(kind, dtype="float32"):
        config, fields = KINDS[kind]
        std = 0.1 if fields.get("tie_word_embeddings") else 1.0
        return write_tiny(root / f"{kind} {dtype}", config, torch_dtype=dtype, gain=1.0, embedding_std=std, **fields)

    return written


@cache
def reference(path, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager", experts_implementation="eager").eval()


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_agree_with_transformers(kind, folder):
    with torch.no_grad():
        expected = [reference(folder(kind), torch.float32)(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in SEQUENCES]
    wanted = [list(range(len(ids))) for ids in SEQUENCES]
    scores = on_ranks(Setup(folder(kind)), lambda model, _: token_logprobs(model, SEQUENCES, rows=wanted))[0]
    for rows, ours, theirs, ids in zip(scores.rows, scores.logprobs, expected, SEQUENCES, strict=True):
        assert (rows - theirs).abs().max() <= 1e-5
        assert (ours - theirs[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]).abs().max() <= 1e-5 if len(ids) > 1 else not len(ours)


@cache
def float64_gradients(path):
    model = reference(path, torch.float64)
    model.zero_grad()
    logprobs = model(TOKENS[:, :-1]).logits.log_softmax(-1).gather(-1, TOKENS[:, 1:, None])
    (-logprobs.sum() * WEIGHT).backward()
    return {key: value for name, parameter in model.named_parameters() for key, value in by_checkpoint_name(name, parameter.grad)}


def by_checkpoint_name(name, value):
    """transformers keeps the experts of a layer in two parameters, checkpoints keep each expert's three."""
    if ".experts." not in name:
        yield name, value
        return
    layer, part = name.rsplit(".", 1)
    for expert, each in enumerate(value):
        if part == "gate_up_proj":
            gate, up = each.chunk(2)
            yield f"{layer}.{expert}.gate_proj.weight", gate
            yield f"{layer}.{expert}.up_proj.weight", up
        else:
            yield f"{layer}.{expert}.down_proj.weight", each


def megatron_gradients(setup, micro_batches):
    def work(model, setup):
        losses(ddp(model), TOKENS.chunk(micro_batches), backward=True, weight=WEIGHT)
        with Checkpoint(setup.path) as checkpoint:
            return gradients(model, checkpoint)

    return on_ranks(setup, work)[-1]


def errors(got, path):
    exact = float64_gradients(path)
    assert got.keys() == exact.keys()
    return {name: float((got[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


@pytest.mark.parametrize(
    "kind, layout, micro_batches",
    [
        ("dense", Layout(), 1),
        ("dense", Layout(tp=2), 2),
        ("dense", Layout(tp=4, sp=True), 1),
        ("dense tied, 2 groups", Layout(), 1),
        ("dense tied, 2 groups", Layout(tp=2, sp=True), 1),
        ("dense tied, 2 groups", Layout(tp=2, pp=2, sp=True), 4),
        ("moe", Layout(), 2),
        ("moe", Layout(tp=2, ep=2, etp=1, sp=True), 1),
        pytest.param("moe not renormalised", Layout(tp=2, sp=True), 1, marks=pytest.mark.full),
        pytest.param("dense", Layout(pp=2), 2, marks=pytest.mark.full),
        pytest.param("dense", Layout(tp=2, sp=True), 1, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_gradients_agree_with_float64(kind, layout, micro_batches, folder):
    path = folder(kind)
    found = errors(megatron_gradients(Setup(path, layout), micro_batches), path)
    assert max(found.values()) < 1e-5, max(found, key=found.get)


def test_bf16_gradients_are_no_worse_than_stock(folder):
    path = folder("dense", "bfloat16")
    ours, stock = (errors(megatron_gradients(Setup(path, ordered=ordered, padding=0.0), 1), path) for ordered in (True, False))
    assert sum(ours.values()) <= 1.1 * sum(stock.values())

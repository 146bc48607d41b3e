"""Models of transformers, as they are: AutoTP takes their own plan (``autotp_size`` alone). Needs DeepSpeed: make test-deepspeed."""

import pytest

pytest.importorskip("deepspeed", reason="NOT RUN: deepspeed is not installed here: make test-deepspeed")

import deepspeed
import torch
from deepspeed_runs import VOCAB, Layout, batches, configuration, here, joined, weights
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tio_megatron as tio
from tio_megatron.testing import assert_same_bytes, run_ranks
from tio_megatron.testing.ranks import RankError

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def steps(rank, kind, layout, tied, section):
    """Losses, norms and weights of three steps."""
    here(rank, layout.world)
    if layout.ours:
        tio.apply()
    config, model = KINDS[kind]
    torch.manual_seed(5)
    built = model(config(**SHAPE, tie_word_embeddings=tied))
    for name, parameter in built.named_parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(sum(name.encode())))
    settings = configuration(layout)
    if layout.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tp, **section}
    engine, *_ = deepspeed.initialize(model=built, config=settings)
    found, count = {}, engine.gradient_accumulation_steps()
    for step, batch in enumerate(batches(3)):
        for number in range(rank // layout.tp * count, (rank // layout.tp + 1) * count):
            loss = engine(input_ids=batch[number], labels=batch[number]).loss
            found[f"loss {step} {number}"] = loss.detach().clone()
            engine.backward(loss)
            engine.step()
        found[f"norm {step}"] = torch.tensor(float(engine.get_global_grad_norm()))
    return found | weights(rank, layout, built)


def run(kind, layout, *, tied=False, **section):
    return joined(run_ranks(layout.world, steps, kind, layout, tied, section, timeout=200))


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("qwen3", False)])
def test_every_layout_has_the_bytes_of_one_process(kind, tied):
    section = {"vocab_parallel_lm_head": False} if tied else {}
    alone = run(kind, Layout(bf16=True), tied=tied)
    for layout in (Layout(world=2, bf16=True, stage=2), Layout(world=2, tp=2, bf16=True), Layout(world=4, tp=2, bf16=True, stage=2)):
        found = run(kind, layout, tied=tied, **section)
        assert set(found) == set(alone)
        for name, value in alone.items():
            assert_same_bytes(found[name], value, f"{kind} {layout}: {name}")


@pytest.mark.parametrize("layout", [Layout(world=2, bf16=True, ours=False), Layout(world=2, tp=2, bf16=True, ours=False)], ids=str)
def test_stock_differs(layout):
    alone, found = run("qwen3", layout._replace(world=1, tp=1)), run("qwen3", layout)
    assert any(value.float().numpy().tobytes() != found[name].float().numpy().tobytes() for name, value in alone.items())


def test_a_tied_head_is_refused_with_what_would_work():
    """AutoTP cuts the vocabulary by itself then."""
    with pytest.raises(RankError, match="lm_head is a VocabParallelLinear: .*tensor_parallel.vocab_parallel_lm_head: false would work"):
        run("llama", Layout(world=2, tp=2, bf16=True), tied=True)

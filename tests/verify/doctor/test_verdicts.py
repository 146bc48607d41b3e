"""The doctor, the contract, and what the two engines refuse when they are started: one verdict for random pairs of layouts."""

import random
import re

import pytest

import tio_megatron
from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import Contract, Cuts, Layout
from tio_megatron.integrations.megatron.applied import refusals
from tio_megatron.integrations.megatron.weights.from_hf import transformer_config
from tio_megatron.models import shape_from_hf
from tio_megatron.testing.qwen3 import DENSE, MOE
from tio_megatron.verify.doctor import fit

PAIRS = 36
SIZES = (1, 2, 3, 4, 6, 8, 16)


def shapes(source):
    """A config.json with random sizes; some that no layout cuts well."""
    heads = source.choice((4, 6, 8, 12, 16))
    kv = source.choice([count for count in (1, 2, 3, 4, 8) if heads % count == 0])
    config = dict(source.choice((MOE, DENSE)), num_attention_heads=heads, num_key_value_heads=kv)
    if "num_experts" in config:
        config |= {"num_experts": source.choice((6, 8, 12, 16)), "moe_intermediate_size": source.choice((32, 48, 80, 96))}
    else:
        config |= {"intermediate_size": source.choice((64, 96, 144, 176))}
    return config


def cases():
    source = random.Random(20)
    for _ in range(PAIRS):
        config = shapes(source)
        moe = "num_experts" in config
        tp, ep = source.choice(SIZES), source.choice(SIZES) if moe else 1
        etp = source.choice((1, tp, source.choice(SIZES))) if moe else tp
        dp = next(dp for dp in range(1, 2000) if (tp * dp) % (ep * etp) == 0)
        trainer = Layout(tp=tp, ep=ep, etp=etp, sp=tp > 1, dp=dp)
        rollout = Layout.for_vllm(source.choice(SIZES), moe and source.random() < 0.5)
        contract = source.choice((None, Contract(), Contract(cuts=Cuts.uniform(4))))
        yield config, trainer, rollout, contract


def megatrons(config, layout, contract):
    """What the trainer refuses when the model is built: the lines of ``apply()``'s error."""
    checkpoint = CheckpointConfig.from_dict(config)
    with tio_megatron.apply(contract, vocab_size=checkpoint.shape.vocab):
        try:
            made = transformer_config(checkpoint, Layout())
            made.tensor_model_parallel_size, made.sequence_parallel = layout.tp, layout.sp
            made.expert_model_parallel_size, made.expert_tensor_parallel_size = layout.ep, layout.expert_tp
            refusals.check(made, {"position_embedding_type": "rope"}, contract, checkpoint.shape.vocab)
        except ValueError as error:
            return [line.strip() for line in str(error).splitlines()[1:]]
    return []


def vllms(config, layout, contract):
    """What the rollout refuses when the engine is built."""
    from types import SimpleNamespace

    from tio_megatron.integrations.vllm import refusals as vllm_refusals

    hf = SimpleNamespace(to_dict=lambda: config, num_experts=config.get("num_experts"))
    parallel = SimpleNamespace(tensor_parallel_size=layout.tp, enable_expert_parallel=layout.ep > 1)
    made = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=hf, architectures=config["architectures"]), parallel_config=parallel)
    return [str(problem) for problem in contract.problems(vllm_refusals.layout_of(made), vllm_refusals.shape_of(made), serving=True)]


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[1]} / {case[2]}")
def test_one_verdict(case):
    config, trainer, rollout, contract = case
    shape = shape_from_hf(config)
    found = fit(shape, trainer, rollout, contract=contract, training=False)
    bad = [finding for finding in found.findings if finding.level == "bad"]
    held = found.contract
    for side, layout, refused in (("trainer", trainer, megatrons(config, trainer, held)), ("rollout", rollout, vllms(config, rollout, held))):
        said = {f"{finding.what.partition(': ')[2]}; {finding.works}" for finding in bad if finding.what.startswith(side)}
        assert said == set(refused), side
        try:
            held.check(layout, shape, serving=side == "rollout")
        except ValueError as error:
            assert {line.strip() for line in str(error).splitlines()[1:]} == said
        else:
            assert not said
    for finding in bad:  # a product and its numbers
        assert re.search(r"\d", finding.what) and finding.works
    if bad:
        assert found.nearest or contract is not None
    for left, right in found.nearest:
        both = contract or Contract.for_layouts(left, right)
        both.check(left, shape)
        both.check(right, shape, serving=True)
        assert not megatrons(config, left, both) and not vllms(config, right, both)


def test_both_verdicts_are_among_the_cases():
    verdicts = [fit(shape_from_hf(c), t, r, contract=k, training=False).findings[0].level for c, t, r, k in cases()]
    assert 6 <= verdicts.count("ok") <= PAIRS - 6, verdicts

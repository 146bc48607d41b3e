"""The expert layer against float64 and against HF's block: outputs, and every gradient in several layouts."""

import functools

import moe_world as world
import pytest
import torch
from megatron.core import parallel_state

LAYOUTS = [(1, 1, 1), (1, 4, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 1, 4)]


def exact(p, k, normalise=True, dtype=torch.float64):
    """The layer in float64 by plain torch: output and gradients of everything."""
    leaves = {name: getattr(p, name).to(dtype).requires_grad_() for name in ("x", "router", "gate", "up", "down")}
    x = leaves["x"].flatten(0, 1)
    probs, ids = torch.softmax(x @ leaves["router"].T, 1).topk(k, 1)
    probs = probs / probs.sum(1, keepdim=True) if normalise else probs
    out = torch.zeros_like(x)
    for e in range(leaves["router"].shape[0]):
        token, choice = (ids == e).nonzero(as_tuple=True)
        inner = torch.nn.functional.silu(x[token] @ leaves["gate"][e].T) * (x[token] @ leaves["up"][e].T)
        out = out.index_add(0, token, (inner @ leaves["down"][e].T) * probs[token, choice, None])
    out = out.view(p.x.shape)
    out.backward(p.dout.to(dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@functools.cache
def reference(row, normalise=True):
    return exact(world.problem(row), row.k, normalise)


def everything(row, **fields):
    """Output and gradients of the whole layer from the row's ranks, summed in float64 where several ranks hold a part of one gradient."""
    p, n, width = world.problem(row), row.experts, world.WIDTH

    def work(rank):
        layer = world.build(row, **fields)
        place, found = world.step(layer, row, p.x, p.dout)
        found["router"] = layer.router.weight.grad
        pairs = [(w13.grad, w2.grad) for w13, w2 in world.expert_weights(layer)]
        return place, found, parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank(), pairs

    results = world.run(row, work)
    parts = [(place, found) for place, found, *_ in results]
    total = {"out": world.gather(parts, "out"), "x": world.gather(parts, "dx"), "router": sum(found["router"].double() for _, found in parts)}
    total |= {"gate": torch.zeros(n, width, world.H).double(), "up": torch.zeros(n, width, world.H).double(), "down": torch.zeros(n, world.H, width).double()}
    for _, _, ep, etp, pairs in results:
        lo, cut = ep * n // row.ep, slice(etp * width // row.etp, (etp + 1) * width // row.etp)
        for i, (w13, w2) in enumerate(pairs):
            gate, up = w13.double().chunk(2)
            total["gate"][lo + i, cut] += gate
            total["up"][lo + i, cut] += up
            total["down"][lo + i, :, cut] += w2
    return total


def error(a, b):
    """Largest difference over the largest value."""
    return ((a.double() - b.double()).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("way", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda sizes: "tp{}-ep{}-etp{}".format(*sizes))
def test_fp32_gradients_are_right_in_every_layout(layout, way):
    row = world.Row(*layout, way=way, k=4)
    found, true = everything(row), reference(row.alone)
    for name, value in true.items():
        assert error(found[name], value) < 2e-6, name


@pytest.mark.parametrize("grouped", [True, False])
def test_bf16_gradients_are_right(grouped):
    """Inputs and weights are the same bf16 numbers on both sides; each rounding to bf16 costs at most 2^-9."""
    row = world.Row(tp=2, ep=2, way="allgather", k=8, dtype="bf16", grouped=grouped)
    found, true = everything(row), reference(row.alone)
    for name, value in true.items():
        assert error(found[name], value) < 2e-2, name


def test_probabilities_not_made_to_sum_to_one():
    row = world.Row(k=4)
    found, true = everything(row, moe_router_pre_softmax=True), reference(row, False)
    for name, value in true.items():
        assert error(found[name], value) < 2e-6, name


def test_no_worse_than_hf():
    """HF's Qwen3MoeSparseMoeBlock in fp32 on the same numbers: our error against float64 is at most twice its own, and the two agree."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    row = world.Row(k=4)
    p, true = world.problem(row), reference(row)
    config = Qwen3MoeConfig(
        hidden_size=world.H, moe_intermediate_size=world.WIDTH, num_experts=row.experts, num_experts_per_tok=row.k, norm_topk_prob=True, hidden_act="silu"
    )
    block = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(p.router)
        block.experts.gate_up_proj.copy_(torch.cat((p.gate, p.up), 1))
        block.experts.down_proj.copy_(p.down)
        theirs = block(p.x.transpose(0, 1).contiguous()).transpose(0, 1)
    ours = world.alone(row)["out"]
    assert (ours - theirs).abs().max() < 1e-5
    assert error(ours, true["out"]) <= 2 * error(theirs, true["out"])

"""Inside stock vLLM's fused experts on a CPU: activations and rows through the operator itself, and the order in which it adds a token's experts, named."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from tio_megatron.integrations.vllm.recording.experts import _stock
from tio_megatron.testing import assert_same_bytes
from tio_megatron.traces import Tracer, TraceWriter, open_trace
from tio_megatron.verify.diagnosis import diagnose

T, H, WIDTH, E, K = 24, 64, 96, 8, 4
"""Tokens, hidden, width of an expert (wider than the hidden row, so that activations come in two runs), experts, chosen ones."""
SLOTS = "experts by descending probability, fused multiply-adds, sums fp32"
"""How vLLM's CPU operator adds a token's experts: the router hands them over by descending probability."""


class Experts(SimpleNamespace):
    """What the recorder needs of vLLM's module."""

    def forward_modular(self, x, topk_weights, topk_ids):
        return self.quant_method.apply(self, x, topk_weights, topk_ids)


def layer(dtype):
    """A layer's experts as vLLM's CPU engine holds them, with its own operator; and what it holds, unpacked."""
    ops = pytest.importorskip("vllm._custom_ops")
    source = torch.Generator().manual_seed(3)
    w13, w2 = ((torch.randn(E, *shape, generator=source) * 0.2).to(dtype) for shape in ((2 * WIDTH, H), (H, WIDTH)))

    def apply(hidden_states, w1, w2, topk_weights, topk_ids, **more):
        out = torch.empty_like(hidden_states)
        ops.cpu_fused_moe(out, hidden_states, w1, w2, None, None, topk_weights, topk_ids, "silu", "vec", False)
        return out

    experts = SimpleNamespace(isa="vec", moe_config=SimpleNamespace(intermediate_size_per_partition=WIDTH))
    held = Experts(w13_weight=ops.cpu_prepack_moe_weight(w13, "vec"), w2_weight=ops.cpu_prepack_moe_weight(w2, "vec"))
    held.activation, held.apply_router_weight_on_input, held.global_num_experts, held.expert_map = "silu", False, E, None

    def method(layer, x, topk_weights, topk_ids, **more):
        return apply(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids)

    held.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts, apply=apply), apply=method)
    return held, w13, w2


def record(folder, held, w2, x, weights, ids, out=None):
    """A trace of one sequence through the layer by the recorder; ``out`` in place of the operator's sum."""
    shape = {"layers": 1, "moe": [True], "hidden": H, "experts": E, "top_k": K}
    with TraceWriter(folder, [list(range(T))], engine="vllm", shape=shape, keep=True) as writer, Tracer(writer).rows([(0, 0, T)]):
        at = torch.arange(T)
        run = SimpleNamespace(writer=writer, at=at, ranks=1, rank=0, put=lambda name, rows: writer.put(name, rows, at))
        writer.put("layers.0.mlp_norm", x, at)
        with ExitStack() as stack:
            _stock(stack, run, held, "layers.0.", None)
            made = held.forward_modular(x, weights, ids)
        writer.put("layers.0.mlp_out", made if out is None else out, at)
        for expert in range(E):
            writer.weight(f"model.layers.0.mlp.experts.{expert}.down_proj.weight", w2[expert])
    return open_trace(folder)


def routed(dtype):
    source = torch.Generator().manual_seed(5)
    x = torch.randn(T, H, generator=source).to(dtype)
    weights, ids = torch.rand(T, E, generator=source).softmax(-1).topk(K)
    return x, (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.to(torch.int32).contiguous()


def test_activations_and_rows_are_those_of_the_operator(tmp_path):
    held, w13, w2 = layer(torch.bfloat16)
    x, weights, ids = routed(torch.bfloat16)
    before = dict(vars(held))
    trace = record(tmp_path / "a", held, w2, x, weights, ids)
    assert dict(vars(held)) == before, "something of the layer was left changed"
    order = trace.values("layers.0.expert_ids").long()
    both = torch.einsum("th,tkih->tki", x.double(), w13[order].double()).float()
    act = (torch.nn.functional.silu(both[..., :WIDTH]) * both[..., WIDTH:]).bfloat16()
    found = trace.values("layers.0.expert_act")
    assert found.shape == (T, K, WIDTH) and float((found == act).double().mean()) > 0.99
    rows = torch.einsum("tki,tkhi->tkh", found.double(), w2[order].double()).to(torch.bfloat16)
    assert float((trace.values("layers.0.expert_out") == rows).double().mean()) > 0.99
    # the control: the activations of another expert are others
    assert float((found == act.roll(1, 1)).double().mean()) < 0.1


def added(rows, weights, ids, kind):
    """``rows`` [T, K, H] in ascending id, weighted and added in that order; ``kind`` of the running sum."""
    p = weights.gather(1, ids.long().argsort(-1))
    total = (rows[:, 0].float() * p[:, :1]).to(kind)
    for k in range(1, K):
        total = (total.float() + rows[:, k].float() * p[:, k : k + 1]).to(kind)
    return total.to(rows.dtype)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_order_of_stocks_sum_is_named(kind, tmp_path):
    """Against a side that rounds rows first, as transformers and the contract do, and adds them by ascending id in ``kind``."""
    held, _, w2 = layer(torch.bfloat16)
    x, weights, ids = routed(torch.bfloat16)
    a = record(tmp_path / "a", held, w2, x, weights, ids)
    rows = a.values("layers.0.expert_out")
    other = added(rows, weights, ids, kind)
    b = record(tmp_path / "b", held, w2, x, weights, ids, out=other)
    found = diagnose(a, b)
    assert (found.kind, found.cause, found.point, found.side) == ("framework", "extra-rounding", "layers.0.mlp_out", "A"), found
    assert any("A: rows not rounded before they are weighted and added; experts by" in line for line in found.evidence), found
    assert SLOTS in [found.details["order_a"], *found.details["same_bytes_a"]], found
    running = "fp32" if kind == torch.float32 else "bf16"
    assert found.details["order_b"].startswith("experts by ascending id, products fp32") and found.details["order_b"].endswith(f"sums {running}"), found


def test_the_order_of_stocks_sum_is_told_from_all_others_in_fp32(tmp_path):
    """Nothing is rounded away there: one chain of fused multiply-adds over the router's slots, and no other known order gives its bytes."""
    held, _, w2 = layer(torch.float32)
    x, weights, ids = routed(torch.float32)
    a = record(tmp_path / "a", held, w2, x, weights, ids)
    b = record(tmp_path / "b", held, w2, x, weights, ids, out=added(a.values("layers.0.expert_out"), weights, ids, torch.float32).float())
    found = diagnose(a, b)
    assert (found.kind, found.cause, found.point) == ("order", "order", "layers.0.mlp_out"), found
    assert (found.details["order_a"], found.details["same_bytes_a"]) == (SLOTS, []), found
    assert found.details["order_b"] == "experts by ascending id, products fp32, sums fp32", found


def test_a_layer_with_another_kernel_has_no_activations():
    from tio_megatron.integrations.vllm.tracing import stock_activations

    other = SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=SimpleNamespace())))
    assert stock_activations(other, torch.zeros(1, H), torch.zeros(1, 1, dtype=torch.int32)) is None


def test_rows_do_not_depend_on_their_neighbours():
    """What makes running the operator once more honest: one token alone, in any company, gives the same bytes."""
    held, _, _ = layer(torch.bfloat16)
    x, weights, ids = routed(torch.bfloat16)
    whole = held.forward_modular(x, weights, ids)
    assert_same_bytes(torch.cat([held.forward_modular(x[i : i + 1], weights[i : i + 1], ids[i : i + 1]) for i in range(T)]), whole, "one token at a time")

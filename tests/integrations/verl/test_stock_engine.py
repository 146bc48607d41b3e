"""The stock control's experts, packed when they are used: vLLM's kernel gives the bytes that it gives for experts packed when they were loaded."""

from types import SimpleNamespace

import pytest
import torch

from tio_megatron.integrations.verl import stock_engine
from tio_megatron.testing import assert_same_bytes

E, H, F, T, K = 4, 64, 32, 5, 2


def test_experts_packed_when_used():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (before all others of its workers)
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    made = torch.Generator().manual_seed(1)
    w13, w2, x = (torch.randn(*shape, generator=made).bfloat16() for shape in ((E, 2 * F, H), (E, H, F), (T, H)))
    rest = (None, None, torch.rand(T, K, generator=made), torch.randint(E, (T, K), generator=made, dtype=torch.int32), "silu", "vec", False)
    found = {}
    for name, function, weights in (
        ("packed at load", cpu_fused_moe, (cpu_prepack_moe_weight(w13, "vec"), cpu_prepack_moe_weight(w2, "vec"))),
        ("packed when used", stock_engine._packed_when_used(cpu_fused_moe), (w13, w2)),
        ("loaded again, never packed", cpu_fused_moe, (w13, w2)),
    ):
        found[name] = torch.empty_like(x)
        function(found[name], x, *weights, *rest)
    assert_same_bytes(found["packed when used"], found["packed at load"])
    with pytest.raises(AssertionError):
        assert_same_bytes(found["loaded again, never packed"], found["packed at load"])


def test_experts_that_would_be_padded_are_refused():
    build = stock_engine._not_packed(lambda self, layer: None)
    experts = SimpleNamespace(
        moe_config=SimpleNamespace(intermediate_size_per_partition=48), _padded_intermediate_size=lambda config: 64, _intermediate_alignment=lambda: 32
    )
    with pytest.raises(ValueError, match="experts of 48 rows per rank cannot be loaded again in the stock control; a multiple of 32 would work"):
        build(experts, torch.nn.Module())

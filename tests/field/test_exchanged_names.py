"""Right bytes under wrong names: a push that exchanged two tensors of one shape is seen by one comparison with the checkpoint's digests."""

from __future__ import annotations

from tests.integrations.vllm.engines import Engine
from tio_megatron.checkpoint import Checkpoint, digest_differences
from tio_megatron.integrations.vllm import push_weights


def test_two_exchanged_tensors_are_named_by_the_comparison_of_digests(engine: Engine) -> None:
    one, other = "model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.5.gate_proj.weight"
    names = {one: other, other: one}
    with Checkpoint(engine.folder) as checkpoint:
        kept = checkpoint.digests()
        exchanged = push_weights(engine.llm, ((names.get(name, name), tensor) for name, tensor in checkpoint.tensors()), engine.contract)
        assert engine.rpc("tio_digests") == exchanged != kept
        assert [line.partition(":")[0] for line in digest_differences(kept, exchanged)] == sorted([one, other])
        assert push_weights(engine.llm, checkpoint.tensors(), engine.contract) == kept == engine.rpc("tio_digests")

"""Cases about Transformer Engine's names, run by ``python te_cases.py`` with the stand-in on the path. Prints ``done CASE`` for each."""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent


def config(experts: int, grouped: bool, tp: int = 1) -> Any:
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=32,
        ffn_hidden_size=128,
        num_moe_experts=experts or None,
        moe_ffn_hidden_size=64 if experts else None,
        moe_grouped_gemm=grouped,
        moe_shared_expert_intermediate_size=64 if experts and grouped else None,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def model(experts: int, grouped: bool, *, te: bool, tp: int = 1) -> Any:
    """A GPTModel by the spec for Transformer Engine, or by the local one."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec

    made = config(experts, grouped, tp)
    if te:
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts or None, moe_grouped_gemm=grouped, qk_layernorm=True)
    else:
        spec = get_gpt_layer_local_spec(num_experts=experts or None, moe_grouped_gemm=grouped, qk_layernorm=True, normalization="RMSNorm")
    return GPTModel(made, spec, vocab_size=1024, max_sequence_length=64, position_embedding_type="rope").bfloat16()


def filled(like: dict[str, Any]) -> dict[str, Any]:
    """Values for every entry, extra states included, by the entry's name alone."""
    import zlib

    import torch

    found = {}
    for name, value in like.items():
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if value is None:
            found[name] = None  # of a local layer: the output layer is one in every model
        elif name.endswith("_extra_state"):
            found[name] = torch.randint(256, (7,), generator=draw, dtype=torch.uint8)
        else:
            found[name] = (torch.randn(value.shape, generator=draw) * 0.05 + (1.0 if "norm" in name else 0.0)).bfloat16()
    return found


def local_names(name: str) -> str:
    """The name in a model of local layers."""
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def inside(work: Any) -> Any:
    """``work`` as a rank's function: with a CPU device and groups."""

    def rank_main(rank: int, tp: int, *arguments: Any) -> Any:
        from megatron.core import parallel_state, tensor_parallel

        from tio_megatron.integrations.megatron import cpu_device

        with cpu_device.enabled():
            parallel_state.initialize_model_parallel(tp)
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            return work(tp, *arguments)

    return rank_main


def checkpoints(tp: int, experts: int, grouped: bool) -> None:
    """Ours has the names and shapes of the model on Transformer Engine; its checkpoint loads, and is saved as it was."""
    import torch
    import transformer_engine
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    import tio_megatron as tio
    from tio_megatron.testing import assert_same_bytes

    stock = model(experts, grouped, te=True)
    assert {"TELayerNormColumnParallelLinear", "TEDotProductAttention", "RMSNorm"} <= set(transformer_engine.NOTES), "the control: stock builds on it"
    theirs = stock.state_dict()
    written = filled(theirs)
    stock.load_state_dict(written)
    transformer_engine.NOTES.clear()
    with tio.apply(vocab_size=1000):
        ours = model(experts, grouped, te=True)
        assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in stock.named_parameters()}
        assert not list(ours.load_state_dict(written, strict=True).missing_keys)
        assert_same_bytes(dict(ours.state_dict()), written, "saved again")
        # Without extra states, as older releases and local layers write.
        again = model(experts, grouped, te=True)
        again.load_state_dict({n: v for n, v in written.items() if not n.endswith("_extra_state")}, strict=True)

        assert keys(ours) == keys(stock), sorted(keys(ours).items() ^ keys(stock).items())
        with tempfile.TemporaryDirectory() as folder:
            there, back = (Path(folder) / name for name in ("there", "back"))
            for place in (there, back):
                place.mkdir()
            dist_checkpointing.save(stock.sharded_state_dict(), str(there))
            through = model(experts, grouped, te=True)
            asked = dist_checkpointing.load(through.sharded_state_dict(), str(there), strict=StrictHandling.RAISE_ALL)
            through.load_state_dict(asked, strict=True)
            dist_checkpointing.save(through.sharded_state_dict(), str(back))
            theirs_again = dist_checkpointing.load(stock.sharded_state_dict(), str(back), strict=StrictHandling.RAISE_ALL)
            theirs_first = dist_checkpointing.load(stock.sharded_state_dict(), str(there))
            assert theirs_first.keys() == theirs_again.keys() and any("_extra_state" in name for name in theirs_first)
            assert_same_bytes(theirs_again, theirs_first, "through ours and back, distributed")
            if not grouped:  # whose extra states stock unpickles, and these are none
                assert all(name.endswith("core_attention._extra_state") for name in stock.load_state_dict(theirs_again, strict=False).missing_keys)

        local = model(experts, grouped, te=False)
        local.load_state_dict({local_names(n): v for n, v in written.items() if not n.endswith("_extra_state")}, strict=True)
        tokens = torch.randint(1000, (2, 33), generator=torch.Generator().manual_seed(1))
        inputs = (tokens[:, :-1], torch.arange(32).expand(2, -1), None)
        with torch.no_grad():
            expected = local(*inputs, labels=tokens[:, 1:])
            assert_same_bytes(ours(*inputs, labels=tokens[:, 1:]), expected, "losses")
            ours.decoder.layers[0].self_attention.linear_qkv.layer_norm_weight.mul_(1.5)
            assert not torch.equal(ours(*inputs, labels=tokens[:, 1:]), expected), "control: the fused norm's weight counts"
        assert not transformer_engine.NOTES, transformer_engine.NOTES


def keys(made: Any) -> dict[str, Any]:
    """Names, keys and whole shapes in a distributed checkpoint."""
    found = made.sharded_state_dict().items()
    return {name: (value.key, tuple(getattr(value, "global_shape", ()))) for name, value in found}


def trained(tp: int, te: bool) -> dict[str, Any]:
    """This rank's gradients after one backward pass, by local names; what is cut over ranks is whole only where tp is 1."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import tio_megatron as tio

    with tio.apply(vocab_size=1000):
        made = model(0, False, te=te, tp=tp)
        with torch.no_grad():
            for name, weight in made.named_parameters():
                if "norm" in name:
                    weight.copy_(filled({local_names(name): weight})[local_names(name)])
        ddp = DistributedDataParallel(made.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), made)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16), [ddp])
        tokens = torch.randint(1000, (2, 33), generator=torch.Generator().manual_seed(1))

        def forward_step(batches: Any, chunk: Any) -> Any:
            ids = next(batches)
            output = chunk(ids[:, :-1], torch.arange(32).expand(len(ids), -1), None, labels=ids[:, 1:])
            return output, lambda losses: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {})

        ddp.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter([tokens]), model=[ddp], num_microbatches=1, seq_length=32, micro_batch_size=2, forward_only=False
        )
        optimizer.step()
        return {local_names(name): weight.detach().clone() for name, weight in made.named_parameters() if "norm" in name}


def gradients(_: int) -> None:
    """The fused norm's weights after a step: the bytes of the separate norm's, and of TP 1."""
    from tio_megatron.testing import assert_same_bytes, run_ranks

    work = inside(trained)
    expected = run_ranks(1, work, 1, False, timeout=300)[0]
    for tp, te in ((1, True), (2, True)):
        for found in run_ranks(tp, work, tp, te, timeout=300):
            assert_same_bytes(found, expected, f"norms after a step, TP {tp}")


def refused(tp: int) -> None:
    """A part of Transformer Engine that is not mapped is refused by its name and place."""
    import torch
    import transformer_engine
    from megatron.core.extensions.transformer_engine import TEFusedMLP, TELayerNormColumnParallelLinear, TELinear, TENorm, TERowParallelLinear
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    import tio_megatron as tio
    from tio_megatron.integrations.megatron.modules.specs import convert

    class Own(MoELayer):
        pass

    class OwnRows(TERowParallelLinear):
        pass

    class FusedLayerNorm(torch.nn.Module):
        """By its name megatron-core's."""

    def moe(grouped: bool) -> Any:
        return get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=grouped, qk_layernorm=True)

    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    with tio.apply():
        for grouped in (False, True):
            convert(moe(grouped), config(8, grouped))  # the control
            for part, name, wrong in (
                ("experts", "linear_fc2", TELinear),
                ("experts", "linear_fc1", TELayerNormColumnParallelLinear),
                ("experts", "linear_fc1", OwnRows),
                ("shared_experts", "linear_fc2", TELinear),
                ("shared_experts", "linear_fc2", OwnRows),
                ("shared_experts", "", TEFusedMLP),
                ("router", "", TELinear),
                ("", "", Own),
            ):
                changed = moe(grouped)
                layer = changed.submodules.mlp
                if name:
                    setattr(getattr(layer.submodules, part).submodules, name, wrong)
                elif part == "router":
                    layer.submodules.router = wrong
                elif part:
                    getattr(layer.submodules, part).module = wrong
                else:
                    layer.module = wrong
                where = ".".join(word for word in (part, name) if word) or "mlp"
                try:
                    convert(changed, config(8, grouped))
                except ValueError as error:
                    assert f"{wrong.__name__} as {where} has no ordered form" in str(error), error
                else:
                    raise AssertionError(f"{wrong.__name__} as {where}: nothing was raised")
        for change, named in (
            (lambda s: setattr(s.submodules, "input_layernorm", FusedLayerNorm), "FusedLayerNorm as input_layernorm has no ordered form"),
            (lambda s: setattr(s.submodules.self_attention.submodules, "linear_proj", TELinear), "TELinear as linear_proj has no ordered form"),
            (lambda s: setattr(s.submodules.self_attention.submodules, "linear_qkv", TERowParallelLinear), "TERowParallelLinear as linear_qkv has no ordered"),
            (lambda s: setattr(s.submodules.self_attention.submodules, "core_attention", TENorm), "TENorm as core_attention has no ordered form"),
            (
                lambda s: setattr(s.submodules.self_attention.submodules, "k_layernorm", TERowParallelLinear),
                "TERowParallelLinear as k_layernorm has no",
            ),
            (lambda s: setattr(s.submodules, "mlp", ModuleSpec(module=TEFusedMLP)), "TEFusedMLP as mlp has no ordered form"),
        ):
            changed = copy.deepcopy(spec)
            change(changed)
            try:
                convert(changed, config(0, False))
            except ValueError as error:
                assert named in str(error), error
            else:
                raise AssertionError(f"{named}: nothing was raised")
    assert transformer_engine.__version__


def main() -> None:
    sys.path[:0] = [str(SUPPORT / "stand_ins" / "transformer_engine_only")]
    import transformer_engine  # noqa: F401  (before megatron-core, which looks for it when it is imported)

    from tio_megatron.testing import run_ranks

    for experts, grouped in ((0, False), (8, False), (8, True)):
        run_ranks(1, inside(checkpoints), 1, experts, grouped, timeout=300)
        print(f"done checkpoints {experts} {grouped}")
    gradients(1)
    print("done gradients")
    run_ranks(1, inside(refused), 1, timeout=300)
    print("done refused")


if __name__ == "__main__":
    main()

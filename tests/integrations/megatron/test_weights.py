"""HF -> Megatron -> HF gives the same bytes in every layout, and a wrong place does not."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tio_megatron.checkpoint import Checkpoint, digest_differences, tensor_digest, write_checkpoint
from tio_megatron.contract import Contract, Layout
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.weights import pieces
from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
from tio_megatron.integrations.megatron.weights.transfer import export_weights, load_weights
from tio_megatron.models import vocabulary_parameters
from tio_megatron.testing import RankError, run_ranks

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 333,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
DENSE = {k: v for k, v in MOE.items() if "expert" not in k and k != "moe_intermediate_size"} | {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 48}
TIED = {"tie_word_embeddings": True}

CASES = [
    ("moe", MOE, Layout()),
    ("moe TP2 EP2", MOE, Layout(tp=2, ep=2, etp=1, sp=True)),
    ("moe TP2 ETP2", MOE, Layout(tp=2, etp=2, sp=True)),
    ("moe EP2, data parallel", MOE, Layout(ep=2, etp=1, dp=2)),
    ("moe PP2", MOE, Layout(pp=2)),
    ("moe TP4 EP2 ETP2, heads of a group cut", MOE, Layout(tp=4, ep=2, etp=2, sp=True)),
    ("moe TP2 PP2 EP2", MOE, Layout(tp=2, ep=2, etp=1, pp=2, sp=True)),
    ("moe tied PP2 EP2", MOE | TIED, Layout(ep=2, etp=1, pp=2, dp=2)),
    ("moe fp32 TP2 EP2", MOE | {"torch_dtype": "float32"}, Layout(tp=2, ep=2, etp=1, sp=True)),
    ("dense TP2", DENSE, Layout(tp=2)),
    ("dense tied TP2 PP2", DENSE | TIED, Layout(tp=2, pp=2)),
]


def start(layout: Layout) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
    )


def built(config, layout: Layout):
    return gpt_model(config, transformer_config(config, layout), vocab_size=padded_vocab(config, layout, Contract()))


def round_trip(rank: int, path, layout: Layout, destination: int | None) -> dict[str, str]:
    with cpu_device.enabled(), Checkpoint(path) as checkpoint:
        start(layout)
        model = built(checkpoint.config, layout)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        load_weights(model, checkpoint)
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        return {name: tensor_digest(tensor) for name, tensor in export_weights(model, checkpoint.config, destination=destination)}


def written(tmp_path, config):
    generator = torch.Generator().manual_seed(0)
    from tio_megatron.checkpoint import CheckpointConfig, tensor_table

    checked = CheckpointConfig.from_dict(config)
    dtype = getattr(torch, checked.dtype)
    return write_checkpoint(tmp_path / "m", config, ((n, torch.randn(s.shape, generator=generator).to(dtype)) for n, s in tensor_table(checked.shape).items()))


@pytest.mark.parametrize("name, config, layout", CASES, ids=[case[0] for case in CASES])
def test_round_trip(name, config, layout, tmp_path):
    digests = written(tmp_path, config)
    world = layout.tp * layout.pp * layout.dp
    everywhere = world == 2
    results = run_ranks(world, round_trip, tmp_path / "m", layout, None if everywhere else world - 1)
    for rank, result in enumerate(results):
        assert digest_differences(result, digests if everywhere or rank == world - 1 else {}) == []


def test_a_wrong_interleave_is_seen(tmp_path):
    """Negative control: the queries of one group taken for another's."""
    digests = written(tmp_path, MOE)

    def shifted(rank):
        with cpu_device.enabled(), Checkpoint(tmp_path / "m") as checkpoint:
            start(Layout())
            model = built(checkpoint.config, Layout())
            load_weights(model, checkpoint)
            weight = model.decoder.layers[1].self_attention.linear_qkv.weight
            weight.data.copy_(weight.roll(weight.shape[0] // 2, 0))
            return {name: tensor_digest(tensor) for name, tensor in export_weights(model, checkpoint.config)}

    found = digest_differences(run_ranks(1, shifted)[0], digests)
    assert [line.split(".weight")[0] for line in found] == [f"model.layers.1.self_attn.{p}_proj" for p in "kqv"]


def test_the_lowest_rank_gives_what_several_hold(tmp_path):
    digests = written(tmp_path, DENSE)

    def differing(rank):
        with cpu_device.enabled(), Checkpoint(tmp_path / "m") as checkpoint:
            start(Layout())
            model = built(checkpoint.config, Layout(dp=2))
            load_weights(model, checkpoint)
            if rank == 1:
                for parameter in model.parameters():
                    parameter.data.zero_()
            return {name: tensor_digest(tensor) for name, tensor in export_weights(model, checkpoint.config, destination=None)}

    for result in run_ranks(2, differing):
        assert digest_differences(result, digests) == []


def test_refusals(tmp_path):
    written(tmp_path, DENSE)

    def attempt(rank, what):
        with cpu_device.enabled(), Checkpoint(tmp_path / "m") as checkpoint:
            start(Layout())
            config = checkpoint.config
            if what == "dtype":
                fields = {"params_dtype": torch.float32, "bf16": False}
                load_weights(gpt_model(config, transformer_config(config, Layout(), **fields), vocab_size=512), checkpoint)
            elif what == "vocabulary":
                load_weights(gpt_model(config, transformer_config(config, Layout()), vocab_size=256), checkpoint)
            elif what == "width":
                load_weights(gpt_model(config, transformer_config(config, Layout(), ffn_hidden_size=64), vocab_size=512), checkpoint)
            elif what == "unknown":
                model = built(config, Layout())
                model.decoder.extra = torch.nn.Linear(2, 2).bfloat16()
                load_weights(model, checkpoint)
            elif what == "missing":
                model = built(config, Layout())
                del model.decoder.layers[3]
                list(export_weights(model, config))

    for what, said in {
        "dtype": "the checkpoint bfloat16; build the model with that params_dtype",
        "vocabulary": "embedding.word_embeddings.weight is [256, 32] on each of 1 ranks",
        "width": "mlp.linear_fc1.weight is",
        "unknown": "decoder.extra.weight: no HF tensor is known",
        "missing": "model.layers.3.input_layernorm.weight: elements from 0 on are held by no rank",
    }.items():
        with pytest.raises(RankError) as error:
            run_ranks(1, attempt, what)
        assert said in str(error.value)


def test_pieces_tile_every_parameter(tmp_path):
    written(tmp_path, MOE)

    def count(rank):
        with cpu_device.enabled(), Checkpoint(tmp_path / "m") as checkpoint:
            layout = Layout(tp=2, ep=2, etp=1, sp=True)
            start(layout)
            model = built(checkpoint.config, layout)
            held = sum(piece.view.numel() for piece in pieces.pieces(model, checkpoint.config.shape))
            padding = sum(p.numel() for n, p in model.named_parameters() if n in vocabulary_parameters())
            total = sum(p.numel() for p in model.parameters())
            dist.barrier()
            return total - padding, held

    for rank, (parameters, held) in enumerate(run_ranks(2, count)):
        rows = min(333, 512) if rank == 0 else 0
        assert held == parameters + 2 * rows * 32

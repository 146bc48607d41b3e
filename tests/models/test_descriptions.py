"""What a description must say, and that another dense architecture is one description."""

import dataclasses

import pytest
import torch

from tests.integrations.megatron.test_weights import built, start
from tio_megatron import models
from tio_megatron.checkpoint import Checkpoint, CheckpointConfig, digest_differences, tensor_digest, write_checkpoint
from tio_megatron.contract import Contract, Cuts, Layout, ModelShape
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.weights.transfer import export_weights, load_weights
from tio_megatron.models import Shard, blocks, qwen3
from tio_megatron.models.description import SIZES
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import DENSE
from tio_megatron.verify import costs

PLAIN = dataclasses.replace(
    qwen3.MODEL,
    name="PlainForCausalLM",
    model_type="plain",
    attention=blocks.attention(head_norms=False),
    megatron={"qk_layernorm": False},
    published={},
)
"""A dense decoder without norms of queries and keys."""

CONFIG = DENSE | {"architectures": ["PlainForCausalLM"], "model_type": "plain", "vocab_size": 333}


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setitem(models.architectures(), PLAIN.name, PLAIN)
    return models.shape_from_hf(CONFIG)


@pytest.mark.parametrize("name", models.architectures())
def test_descriptions_are_whole(name):
    described = models.architectures()[name]
    for moe in (False, True):
        if (described.experts if moe else described.dense) is None:
            continue
        layer = described.layer(moe)
        operations = {operation.point: operation for block in layer for operation in block.operations}
        for block in layer:
            held = {operation.point for operation in block.operations}
            for parameter in block.parameters:
                assert {tensor.point for tensor in parameter.tensors} <= held and {tensor.shard for tensor in parameter.tensors} == {parameter.shard}
                assert all(axis in SIZES for tensor in parameter.tensors for axis in tensor.axes)
                assert bool(parameter.axis) == (parameter.shard is not Shard.REPLICATED)
            assert {*block.modules, *block.vllm_modules} <= held
        assert all(parent in operations or parent in ("stream", "positions") for operation in operations.values() for parent in operation.parents)
    assert {field.name for field in dataclasses.fields(ModelShape)} >= described.sizes.keys()
    assert all(models.architecture_of(shape) for shape, _ in models.published().values())


@pytest.mark.parametrize("name", models.architectures())
def test_a_contract_looks_at_every_axis_of_a_description(name):
    """Sizes of which nothing divides by two: the contract names each axis that has a sum of the model."""
    moe = models.architectures()[name].experts is not None
    sizes = {"experts": 3, "top_k": 1, "moe_ffn": 7} if moe else {"ffn": 7}
    shape = ModelShape(layers=1, hidden=7, heads=1, kv_heads=1, head_dim=7, vocab=7, architecture=name, **sizes)
    said = " ".join(map(str, Contract(Cuts.uniform(2)).problems(Layout(), shape)))
    axes = {placed.parameter.axis for placed in models.parameters(shape)} - {"", "vocab"}
    assert axes == {field.name for field in dataclasses.fields(Cuts) if f"cuts.{field.name} " in said}


def test_sizes_without_an_architecture_have_no_tensors():
    shape = ModelShape(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, vocab=8, ffn=8)
    with pytest.raises(ValueError, match=r"architecture is '', described are \['Qwen3ForCausalLM', 'Qwen3MoeForCausalLM'\]"):
        models.tensor_table(shape)
    with pytest.raises(ValueError, match="described are"):
        list(models.points(1, [False], architecture="LlamaForCausalLM"))


def test_vllms_layers_have_their_axis():
    assert models.row_axis("model.layers.3.self_attn.o_proj") == "attn_row" and models.row_axis("model.layers.3.mlp.down_proj") == "mlp_row"
    assert models.row_axis("model.layers.3.mlp.xdown_proj") is None and models.row_axis("model.layers.3.self_attn.qkv_proj") is None


def test_published_models_are_found_by_name():
    shape, facts = models.published_model("Qwen/Qwen3-30B-A3B")
    assert (shape.experts, shape.architecture, facts["positions"]) == (128, "Qwen3MoeForCausalLM", 40960) and models.published_model("Qwen3-30B-A3B")[
        0
    ] == shape
    assert models.published_model("Other/Qwen3-30B-A3B") is None and models.published_model("Qwen3") is None


def test_a_dense_architecture_is_one_description(plain):
    table = models.tensor_table(plain)
    assert len(table) == models.tensor_count(plain) == 2 * 9 + 3 and not any("q_norm" in name for name in table)
    assert {point.name for point in models.points(2, [False] * 2, architecture=PLAIN.name)} == {
        point.name for point in models.points(2, [False] * 2) if point.part not in ("q_norm", "k_norm")
    }
    rope = next(point for point in models.points(1, [False], architecture=PLAIN.name) if point.part == "q_rope")
    assert rope.parents == ("layers.0.q_proj", "positions")
    assert costs.operators(plain, Layout(tp=2)) == (10, 2) and CheckpointConfig.from_dict(CONFIG).shape == plain


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True)], ids=str)
def test_its_weights_go_there_and_back(plain, tmp_path, layout):
    generator = torch.Generator().manual_seed(0)
    values = ((name, torch.randn(spec.shape, generator=generator).bfloat16()) for name, spec in models.tensor_table(plain).items())
    held = write_checkpoint(tmp_path / "m", CONFIG, values)

    def there_and_back(rank):
        with cpu_device.enabled(), Checkpoint(tmp_path / "m") as checkpoint:
            start(layout)
            model = built(checkpoint.config, layout)
            load_weights(model, checkpoint)
            return {name: tensor_digest(tensor) for name, tensor in export_weights(model, checkpoint.config)}

    found = run_ranks(layout.tp, there_and_back)[0]
    assert not digest_differences(found, held)
    swapped = {"self_attn.k_proj": "self_attn.v_proj", "self_attn.v_proj": "self_attn.k_proj"}
    wrong = {next((name.replace(a, b) for a, b in swapped.items() if a in name), name): digest for name, digest in found.items()}
    assert len(list(digest_differences(wrong, held))) == 4

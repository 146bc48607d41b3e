"""Every table that is derived from a description, beside the one that was written by hand."""

import importlib.util
import itertools
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tio_megatron import models
from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron import pieces
from tio_megatron.models.points import UNNAMED
from tio_megatron.testing.qwen3 import DENSE, MOE
from tio_megatron.verify import costs
from tio_megatron.verify.doctor import models as doctor_models
from tio_megatron.verify.recorders import hf


def before(name):
    spec = importlib.util.spec_from_file_location(f"before_{name}", Path(__file__).parent / "before" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFIGS = {
    "dense": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True},
    "moe": MOE,
    "moe, as transformers 5 writes it": {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 8},
}
SHAPES = {name: models.shape_from_hf(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes(name):
    ours, theirs = asdict(SHAPES[name]), asdict(before("model").ModelShape.from_hf(CONFIGS[name]))
    assert ours.pop("architecture") == CONFIGS[name]["architectures"][0] and ours == theirs


@pytest.mark.parametrize("name", SHAPES)
def test_tensors(name):
    names = before("names")
    ours, theirs = models.tensor_table(SHAPES[name]), names.tensor_table(SHAPES[name])
    assert list(ours) == list(theirs)
    for tensor, spec in ours.items():
        other = theirs[tensor]
        assert (spec.name, spec.shape, spec.shard.value, spec.layer, spec.expert, spec.axis, spec.numel) == (
            *(other.name, other.shape, other.shard.value),
            *(other.layer, other.expert, other.axis, other.numel),
        )
    assert models.tensor_count(SHAPES[name]) == names.tensor_count(SHAPES[name]) == len(ours)


@pytest.mark.parametrize("architecture", ["", *models.architectures()])
@pytest.mark.parametrize("tied", [False, True])
def test_points(architecture, tied):
    for kinds in ([False, False], [True, True], [True, False]):
        if architecture == "Qwen3ForCausalLM" and any(kinds):
            continue
        ours = [asdict(point) for point in models.points(2, kinds, tied=tied, architecture=architecture)]
        assert ours == [asdict(point) for point in before("points").points(2, kinds, tied=tied)]
    assert models.SCALED == before("points").SCALED


LAYER = {
    "input_layernorm.weight": lambda m, p: (m.hidden,),
    "pre_mlp_layernorm.weight": lambda m, p: (m.hidden,),
    "self_attention.linear_qkv.layer_norm_weight": lambda m, p: (m.hidden,),
    "self_attention.linear_qkv.weight": lambda m, p: ((m.heads + 2 * m.kv_heads) * m.head_dim // p.tp, m.hidden),
    "self_attention.q_layernorm.weight": lambda m, p: (m.head_dim,),
    "self_attention.k_layernorm.weight": lambda m, p: (m.head_dim,),
    "self_attention.linear_proj.weight": lambda m, p: (m.hidden, m.heads * m.head_dim // p.tp),
}
ONE = {
    "mlp.linear_fc1.layer_norm_weight": lambda m, p: (m.hidden,),
    "mlp.linear_fc1.weight": lambda m, p: (2 * m.ffn // p.tp, m.hidden),
    "mlp.linear_fc2.weight": lambda m, p: (m.hidden, m.ffn // p.tp),
}
MANY = {
    "mlp.router.weight": lambda m, p: (m.experts, m.hidden),
    "mlp.experts.local_experts.1.linear_fc1.weight": lambda m, p: (2 * m.moe_ffn // p.etp, m.hidden),
    "mlp.experts.local_experts.0.linear_fc2.weight": lambda m, p: (m.hidden, m.moe_ffn // p.etp),
    "mlp.experts.linear_fc1.weight1": lambda m, p: (2 * m.moe_ffn // p.etp, m.hidden),
    "mlp.experts.linear_fc2.weight0": lambda m, p: (m.hidden, m.moe_ffn // p.etp),
}
ENDS = {
    "embedding.word_embeddings.weight": lambda m, p: (1024 // p.tp, m.hidden),
    "output_layer.weight": lambda m, p: (1024 // p.tp, m.hidden),
    "decoder.final_layernorm.weight": lambda m, p: (m.hidden,),
}


@pytest.mark.parametrize("name", SHAPES)
def test_megatron_parameters(name):
    old, shape = before("pieces"), SHAPES[name]
    # The stage's second layer is the model's first.
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=2), SimpleNamespace(layer_number=1)]))
    table, count = models.tensor_table(shape), 0
    for tp, etp, ep in itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4) if shape.experts else (1,)):
        for tp_rank, etp_rank, ep_rank in itertools.product(range(tp), range(etp), range(ep)):
            ours, theirs = (module.Place(tp, tp_rank, etp, etp_rank, ep, ep_rank) for module in (pieces, old))
            held = {f"decoder.layers.1.{inside}": sizes for inside, sizes in (LAYER | (MANY if shape.experts else ONE)).items()} | ENDS
            for parameter, sizes in held.items():
                weight = torch.empty(sizes(shape, ours), device="meta")
                a, b = list(pieces.pieces_of(parameter, weight, model, shape, ours)), list(old.pieces_of(parameter, weight, model, shape, table, theirs))
                assert [(x.name, x.axis, x.start, x.stop, x.view.storage_offset(), x.view.shape) for x in a] == [
                    (x.name, x.axis, x.start, x.stop, x.view.storage_offset(), x.view.shape) for x in b
                ]
                count += len(a)
    assert count > 300
    assert models.vocabulary_parameters() == {*old.VOCABULARY}
    for module, more in ((pieces, ()), (old, (table,))):
        with pytest.raises(ValueError, match=r"no HF tensor is known"):
            list(module.pieces_of("decoder.layers.0.mlp.bias", torch.empty(1), model, shape, *more, module.Place(1, 0, 1, 0, 1, 0)))


@pytest.mark.parametrize("moe", [False, True])
def test_hugging_face_modules(moe):
    old, blocks = before("hf"), UNNAMED[moe].layer(moe)
    outputs = {path: point for block in blocks for path, point in hf._outputs(block).items()}
    inputs = {path: point for block in blocks for path, point in hf._inputs(block).items()}
    dense = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}  # modules that a layer with experts does not have
    assert outputs == {path: point for path, point in old._PLAIN.items() if not (moe and path in dense)}
    assert inputs == {path: point for path, point in old._INPUTS.items() if not (moe and path in dense)}


def test_costs():
    old = before("costs")
    for name, shape in SHAPES.items():
        for tp, etp, ep, pp, sp in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2), (False, True)):
            if (ep > 1 or etp > 1) and not shape.experts:
                continue
            layout = Layout(tp=tp, etp=etp, ep=ep, pp=pp, sp=sp and tp > 1, dp=4)
            assert costs.parameters(shape, layout) == old.parameters(shape, layout), (name, layout)
            assert list(costs._sums(shape, layout, 64, backward=True)) == list(old._sums(shape, layout, 64, backward=True))
            assert list(costs._sums(shape, layout, 64, backward=False)) == list(old._sums(shape, layout, 64, backward=False))
            for serving in (False, True):
                assert costs.operators(shape, layout, serving=serving) == old.operators(shape, layout, serving=serving)


def test_published():
    old = before("doctor_models")
    assert {name: replace(shape, architecture="") for name, shape in doctor_models.KNOWN.items()} == old.KNOWN
    for name in (*old.KNOWN, *(f"Qwen/{name}" for name in old.KNOWN)):
        found = doctor_models.model_of(name)
        assert asdict(replace(found, shape=replace(found.shape, architecture=""))) == asdict(old.model_of(name))


def test_the_axes_of_vllms_layers():
    assert models.row_axis("model.layers.3.self_attn.o_proj") == "attn_row" and models.row_axis("model.layers.3.mlp.down_proj") == "mlp_row"
    assert models.row_axis("model.layers.3.mlp.xdown_proj") is None

"""config.json: what is covered gets through, anything else is refused by name; and the table fits the real models."""

import json

import pytest

from tio_megatron.checkpoint import CheckpointConfig, CheckpointError, Shard, fields, tensor_table
from tio_megatron.models import tensor_count

from .conftest import DENSE, MOE, QWEN3_30B_A3B


def test_the_table_of_the_real_model():
    config = CheckpointConfig.from_dict(QWEN3_30B_A3B)
    table = tensor_table(config.shape)
    assert tensor_count(config.shape) == len(table) == 48 * (9 + 128 * 3) + 3 == 18867
    assert sum(spec.numel for spec in table.values()) == 30_532_122_624
    spec = table["model.layers.47.mlp.experts.127.down_proj.weight"]
    assert (spec.shape, spec.shard, spec.axis, spec.layer, spec.expert) == ((2048, 768), Shard.ROW, 1, 47, 127)
    assert (config.rope_theta, config.rms_eps, config.max_positions, config.normalise, config.dtype) == (1e6, 1e-6, 40960, True, "bfloat16")


@pytest.mark.parametrize("architecture", ["moe", "dense"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_table_is_what_transformers_writes(architecture, tied, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in (MOE if architecture == "moe" else DENSE).items() if k not in ("architectures", "model_type", "torch_dtype")}
    kinds = {"moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM), "dense": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)}
    config_class, model_class = kinds[architecture]
    import torch

    model_class(config_class(**sizes | {"tie_word_embeddings": tied})).to(torch.bfloat16).save_pretrained(tmp_path)
    from tio_megatron.checkpoint import Checkpoint

    with Checkpoint(tmp_path) as checkpoint:
        assert tensor_count(checkpoint.config.shape) == len(checkpoint.table)
        assert checkpoint.config.shape.tied == tied
        assert checkpoint.config.normalise or architecture == "dense"


OPTIONAL = ("model_type", "intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "tie_word_embeddings")


@pytest.mark.parametrize("name", [k for k in MOE if k not in OPTIONAL])
def test_a_missing_field_is_named(name):
    with pytest.raises(CheckpointError, match="dtype" if name == "torch_dtype" else name):
        CheckpointConfig.from_dict({k: v for k, v in MOE.items() if k != name})


POSITIONS = [("many", "'many'"), (10**12, "1000000000000"), (2**20 + 1, "1048577"), (0, "0"), (-1, "-1"), (4096.0, "4096.0"), (True, "True"), ("512", "'512'")]
POSITIONS += [(None, "None"), ([512], r"\[512\]"), (10**400, "a number of about 400 digits")]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "supported are"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope scaling 'linear'"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"torch_dtype": "float16"}, "dtype is 'float16'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is a number of about 400 digits, it must be a finite number above 1"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, it must be a finite number above 1"),
        ({"layer_types": [["full_attention"]]}, "it must be a list of names"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM', supported are"),
        *[({"max_position_embeddings": value}, f"max_position_embeddings is {said}, it must be a whole number from 1 to") for value, said in POSITIONS],
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"eos_token_id": 300}, "eos_token_id 300 is outside the vocabulary of 300"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_experts_per_tok": 9}, "top_k 9"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": "32"}, "hidden_size = '32'"),
        ({"hidden_act": "gelu", "rms_norm_eps": None}, "hidden_act .*; rms_norm_eps"),
        ({"model_type": "llama"}, "model_type is 'llama', supported is 'qwen3_moe'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, supported is 0"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries, num_hidden_layers is 2"),
    ],
)
def test_what_is_not_covered_is_refused(fields, said):
    with pytest.raises(CheckpointError, match=said):
        CheckpointConfig.from_dict(MOE | fields)


ODD = (None, True, 5, -1.5, "false", [], ["x"], [1], {}, {"a": 1})
"""One of each type that JSON has, and lists of some."""


@pytest.mark.parametrize("name", sorted({name for table in (fields._KINDS, fields._OR_NULL) for names in table.values() for name in names}))
def test_a_field_of_another_type_is_refused_by_its_name(name):
    refused = 0
    for value in ODD:
        try:
            CheckpointConfig.from_dict(MOE | {name: value})
        except CheckpointError as error:
            assert name.removeprefix("torch_") in str(error) or name in ("rope_scaling", "rope_parameters"), error
            refused += 1
    assert refused >= 4


def test_a_folder_as_it_was_written_has_the_types_of_the_table():
    assert fields.wrong_types(MOE) == fields.wrong_types(DENSE) == fields.wrong_types(QWEN3_30B_A3B) == []


def test_the_most_positions_are_those_of_the_rotary_table():
    from tio_megatron.kernels.rope import rope_table

    assert CheckpointConfig.from_dict(MOE | {"max_position_embeddings": 2**20}).max_positions == 2**20
    with pytest.raises(ValueError, match="between 1 and 1048576, got 1048577"):
        rope_table(2**20 + 1, 16, 1e4)


def test_newer_spellings():
    sizes = {k: v for k, v in MOE.items() if k not in ("rope_theta", "torch_dtype", "num_experts")}
    config = CheckpointConfig.from_dict(sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "float32", "num_local_experts": 4})
    assert (config.rope_theta, config.dtype, config.shape.experts) == (5e5, "float32", 4)
    assert CheckpointConfig.from_dict({k: v for k, v in MOE.items() if k != "norm_topk_prob"}).normalise is False


def test_a_file_that_is_no_config(tmp_path):
    for text in ("{", "[]", json.dumps(MOE | {"hidden_act": "relu"})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match="JSON|hidden_act"):
            CheckpointConfig.from_file(tmp_path / "config.json")

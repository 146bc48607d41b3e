"""What cannot obey the contract is refused by name when the model is built; what is not a causal mask is refused when it arrives."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig

import tio_megatron as tio
from tio_megatron.contract import Contract, Cuts
from tio_megatron.integrations.megatron.applied import refusals
from tio_megatron.integrations.megatron.modules import masks, specs
from tio_megatron.integrations.megatron.modules import parts as modules
from tio_megatron.integrations.megatron.training import micro_batches

SIZES = dict(num_layers=2, hidden_size=128, num_attention_heads=8, num_query_groups=4, kv_channels=32, ffn_hidden_size=192)
QWEN3 = dict(
    normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, hidden_dropout=0.0, attention_dropout=0.0
)
MODEL = dict(position_embedding_type="rope", rotary_percent=1.0, rope_scaling=False, seq_len_interpolation_factor=None, mtp_block_spec=None)


def config(**changes):
    """Changes are made after Megatron's own checks, some of which would refuse first."""
    made = TransformerConfig(**SIZES | QWEN3)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_qwen3_is_not_refused():
    refusals.check(config(), MODEL, Contract(), 700)


@pytest.mark.parametrize("fusion", ["bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "persist_layer_norm", "deterministic_mode"])
def test_switches_that_do_not_reach_our_layers_are_allowed(fusion):
    refusals.check(config(**{fusion: True}), MODEL, Contract(), 700)


WRONG = dict(
    hidden_dropout=0.1,
    attention_dropout=0.1,
    hybrid_context_parallel=True,
    params_dtype=torch.float16,
    fp16=True,
    fp8="e4m3",
    fp4="e2m1",
    normalization="LayerNorm",
    layernorm_zero_centered_gamma=True,
    qk_l2_norm=True,
    add_bias_linear=True,
    add_qkv_bias=True,
    gated_linear_unit=False,
    activation_func=F.gelu,
    activation_func_clamp_value=7.0,
    glu_linear_offset=1.0,
    multi_latent_attention=True,
    attention_output_gate=True,
    window_size=(128, 0),
    softmax_type="learnable",
    apply_query_key_layer_scaling=True,
    rotary_interleaved=True,
    apply_rope_fusion=True,
    fused_single_qkv_rope=True,
    no_rope_freq=[0, 1],
    cross_entropy_loss_fusion=True,
    mtp_num_layers=1,
    fp32_residual_connection=True,
    tp_comm_overlap=True,
    batch_invariant_mode=True,
    cpu_offloading=True,
    cuda_graph_impl="local",
    flash_decode=True,
    use_kitchen=True,
    defer_embedding_wgrad_compute=True,
    delay_wgrad_compute=True,
    enable_autocast=True,
    is_hybrid_model=True,
)


@pytest.mark.parametrize("option", WRONG)
def test_an_option_is_refused_by_its_name(option):
    with pytest.raises(ValueError, match=rf"(?s)under the contract.*\n  {option}=.*would work"):
        refusals.check(config(**{option: WRONG[option]}), MODEL, Contract(), 700)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("position_embedding_type", "learned_absolute"),
        ("position_embedding_type", "yarn"),
        ("rotary_percent", 0.5),
        ("rope_scaling", True),
        ("seq_len_interpolation_factor", 2.0),
    ],
)
def test_a_model_argument_is_refused_by_its_name(argument, value):
    with pytest.raises(ValueError, match=rf"\n  {argument}=.*would work"):
        refusals.check(config(), MODEL | {argument: value}, Contract(), 700)


@pytest.mark.parametrize("movement", [None, "p2p", "all_gather", "a2a", "a2a+p2p"])
def test_every_movement_of_context_parallelism_is_allowed(movement):
    refusals.check(config(context_parallel_size=2, cp_comm_type=movement), MODEL, Contract(), 700)


def test_a_movement_for_each_layer_is_refused():
    layers = ["p2p", "a2a"]
    refusals.check(config(cp_comm_type=layers), MODEL, Contract(), 700)
    with pytest.raises(ValueError, match=r"\n  cp_comm_type=\['p2p', 'a2a'\]: .* for all layers alike; .*'a2a' .*would work"):
        refusals.check(config(context_parallel_size=2, cp_comm_type=layers), MODEL, Contract(), 700)


def test_every_rule_names_a_field_that_exists():
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert {rule.option for rule in refusals.CONFIG_RULES + refusals.CONTEXT_RULES} <= fields


@pytest.mark.parametrize("option", ["fp8", "fp4"])
def test_a_quantized_configuration_is_refused_before_stock_asks_for_transformer_engine(option):
    asked = SIZES | QWEN3 | {option: WRONG[option], "num_moe_experts": 4, "moe_ffn_hidden_size": 64}
    with tio.apply(), pytest.raises(ValueError, match=rf"\n  {option}='.*would work"):
        TransformerConfig(**asked)
    with tio.apply():
        TransformerConfig(**asked | {option: None})


def test_all_options_are_listed_at_once():
    with pytest.raises(ValueError, match="(?s)hidden_dropout.*fp8.*rope_scaling"):
        refusals.check(config(hidden_dropout=0.1, fp8="e4m3"), MODEL | {"rope_scaling": True}, Contract(), 700)


def test_a_cut_that_misses_the_leaves_is_refused_with_what_works():
    with pytest.raises(ValueError, match=r"mlp.down: cut into 4 parts, but cuts.mlp_row = 2 leaves; tp in \[1, 2\] would work, or cuts.mlp_row = 4"):
        refusals.check(config(tensor_model_parallel_size=4), MODEL, Contract(cuts=Cuts(mlp_row=2)), 700)
    with pytest.raises(ValueError, match=r"200 terms do not divide into cuts.mlp_row = 16"):
        refusals.check(config(ffn_hidden_size=200), MODEL, Contract(cuts=Cuts(mlp_row=16)), 700)


def spec(**options):
    return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm", **options)


def test_a_stock_layer_spec_becomes_ours_with_the_final_norm():
    ours = specs.convert(spec(), config(), pp_rank=0)
    assert len(ours.layer_specs) == 2 and issubclass(ours.layer_norm, modules.OrderedRMSNorm)
    layer = ours.layer_specs[0].submodules
    attention = layer.self_attention.submodules
    assert (attention.linear_qkv, attention.linear_proj, attention.core_attention) == (
        modules.OrderedColumnLinear,
        modules.OrderedRowLinear,
        modules.OrderedCoreAttention,
    )
    assert layer.input_layernorm is attention.q_layernorm is attention.k_layernorm is layer.pre_mlp_layernorm is modules.OrderedRMSNorm
    assert layer.mlp.module is modules.OrderedMLP
    assert layer.sharded_state_dict_keys_map == spec().submodules.sharded_state_dict_keys_map
    assert specs.convert(ours, config()) == ours
    assert specs.gpt_layer_spec(config(), pp_rank=0) == ours


def test_a_block_spec_becomes_ours():
    stock = get_gpt_decoder_block_spec(config(), use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=False, pp_rank=0)
    assert specs.convert(stock, config()) == specs.gpt_layer_spec(config(), pp_rank=0)


def test_converting_leaves_the_stock_spec_alone():
    stock = spec()
    specs.convert(stock, config(), pp_rank=0)
    assert stock == spec()


def test_an_unknown_part_is_refused_by_its_place():
    with pytest.raises(ValueError, match="L2Norm as q_layernorm has no ordered form"):
        specs.convert(spec(qk_l2_norm=True), config(), pp_rank=0)
    other = spec()
    other.submodules.self_attention.submodules.linear_proj = torch.nn.Linear
    with pytest.raises(ValueError, match="Linear as linear_proj has no ordered form; use get_gpt_layer_local_spec"):
        specs.convert(other, config(), pp_rank=0)
    with pytest.raises(ValueError, match="L2Norm as layer has no ordered form"):
        specs.convert(ModuleSpec(module=L2Norm), config(), pp_rank=0)
    with pytest.raises(ValueError, match="dict is not supported"):
        specs.convert({}, config())


def own_add(*_):
    """Not megatron-core's."""


@pytest.mark.parametrize(
    "place, part, says",
    [
        ("self_attn_bda", own_add, "own_add as self_attn_bda has no ordered form"),
        ("mlp_bda", own_add, "own_add as mlp_bda has no ordered form"),
        ("self_attention.submodules.linear_qkv", modules.OrderedRowLinear, "OrderedRowLinear as linear_qkv has no ordered form"),
        ("self_attention.submodules.q_layernorm", modules.OrderedColumnLinear, "OrderedColumnLinear as q_layernorm has no ordered form"),
        ("self_attention.submodules.linear_proj", ModuleSpec(modules.OrderedRowLinear, params={"foo": 1}), r"params of linear_proj \(foo\)"),
        ("mlp.submodules.linear_fc1", ModuleSpec(ColumnParallelLinear, params={"foo": 1}), r"params of linear_fc1 \(foo\)"),
    ],
)
def test_a_part_that_would_be_dropped_or_misplaced_is_refused(place, part, says):
    other = spec()
    *way, name = place.split(".")
    here = other.submodules
    for step in way:
        here = getattr(here, step)
    setattr(here, name, part)
    with pytest.raises(ValueError, match=says):
        specs.convert(other, config(), pp_rank=0)


def hidden(length, *lengths):
    mask = torch.ones(length, length, dtype=torch.bool).triu(1).expand(len(lengths), 1, length, length).clone()
    for sample, true in enumerate(lengths):
        mask[sample, :, :, true:] = True
    return mask


@pytest.mark.parametrize("mask", [None, hidden(5, 5), hidden(5, 5, 3, 0)], ids=["none", "causal", "padding on the right"])
def test_masks_that_are_causal_for_true_tokens(mask):
    masks.require_causal(mask, 5)
    masks.require_causal(mask, 5)


def test_masks_that_are_not():
    left = hidden(5, 5)
    left[..., 0] = True
    with pytest.raises(ValueError, match=r"hides token 0 from token 0 \(sample 0\)"):
        masks.require_causal(left, 5)
    window = hidden(8, 8)
    window[0, 0] |= torch.ones(8, 8, dtype=torch.bool).tril(-3)
    with pytest.raises(ValueError, match="hides token 0 from token 3"):
        masks.require_causal(window, 8)
    with pytest.raises(ValueError, match="shows token 1 to token 0"):
        masks.require_causal(torch.zeros(1, 1, 4, 4, dtype=torch.bool), 4)
    for wrong in (torch.zeros(1, 4), torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 5, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match="is not supported; pass None or bool"):
            masks.require_causal(wrong, 4)


def test_a_mask_is_refused_under_context_parallelism():
    masks.require_causal(None, 4, 2)
    mask = hidden(4, 4)
    masks.require_causal(mask, 4)
    with pytest.raises(ValueError, match=r"a mask \(1, 1, 4, 4\) under context parallelism is not supported; pass None"):
        masks.require_causal(mask, 4, 2)


def test_a_mask_changed_in_place_is_looked_at_again():
    mask = hidden(4, 4)
    masks.require_causal(mask, 4)
    mask[0, 0, 0, 3] = False
    with pytest.raises(ValueError, match="shows token 3"):
        masks.require_causal(mask, 4)


def test_packed_formats():
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    padded = torch.tensor([0, 4, 8], dtype=torch.int32)
    assert micro_batches.packed_starts(PackedSeqParams("thd", starts, starts)) is starts
    assert micro_batches.packed_starts(PackedSeqParams("thd", starts, starts, padded, padded)) is padded
    with pytest.raises(ValueError, match="'sbhd' is not supported"):
        micro_batches.packed_starts(PackedSeqParams("sbhd", starts, starts))
    with pytest.raises(ValueError, match=r"local_cp_size and cp_group \(hybrid context parallelism\) are not supported"):
        micro_batches.packed_starts(PackedSeqParams("thd", starts, starts, local_cp_size=2))
    with pytest.raises(ValueError, match="different places"):
        micro_batches.packed_starts(PackedSeqParams("thd", starts, padded))

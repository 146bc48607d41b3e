"""mbridge builds local layers while the contract's switch is on. mbridge itself is a stand-in of its two methods; make test-verl has the real one."""

import importlib.metadata
import sys
import types

import pytest

from tio_megatron.integrations.patching import MovedSymbolError
from tio_megatron.integrations.verl import local_layers


class Bridge:
    def __init__(self, experts):
        self.config = types.SimpleNamespace(num_moe_experts=experts)

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name):
        return [mcore_weights_name]


class LLMBridge(Bridge):
    def _get_transformer_layer_spec(self, vp_stage=None):
        return "transformer engine"


@pytest.fixture
def mbridge(monkeypatch):
    core, bridge, llm = types.ModuleType("mbridge.core"), types.ModuleType("mbridge.core.bridge"), types.ModuleType("mbridge.core.llm_bridge")
    bridge.Bridge, llm.LLMBridge = Bridge, LLMBridge
    for module in (types.ModuleType("mbridge"), core, bridge, llm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"mbridge": "0.15.1"}.get(name) or real(name))
    yield
    local_layers.disable()


def test_another_mbridge_is_named_and_nothing_is_replaced(mbridge, monkeypatch):
    theirs = LLMBridge._get_transformer_layer_spec
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.16.0")
    with pytest.raises(ImportError, match="mbridge 0.16.0 is installed; tio_megatron supports mbridge 0.15.1"):
        local_layers.enable()
    assert LLMBridge._get_transformer_layer_spec is theirs


def test_local_names_are_read_as_the_names_mbridge_knows_and_undo_restores(mbridge):
    name = "decoder.layers.0.input_layernorm.weight"
    theirs, spec = Bridge._weight_name_mapping_mcore_to_hf, LLMBridge._get_transformer_layer_spec
    local_layers.enable()
    local_layers.enable()
    assert Bridge(8)._weight_name_mapping_mcore_to_hf(name) == ["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"]
    assert Bridge(None)._weight_name_mapping_mcore_to_hf("decoder.layers.0.pre_mlp_layernorm.weight") == ["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"]
    assert Bridge(8)._weight_name_mapping_mcore_to_hf("decoder.layers.0.pre_mlp_layernorm.weight") == ["decoder.layers.0.pre_mlp_layernorm.weight"]
    assert LLMBridge._get_transformer_layer_spec is not spec
    local_layers.disable()
    assert Bridge._weight_name_mapping_mcore_to_hf is theirs and LLMBridge._get_transformer_layer_spec is spec
    assert Bridge(8)._weight_name_mapping_mcore_to_hf(name) == [name]


def test_the_spec_is_megatrons_local_one(mbridge):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    local_layers.enable()
    bridge = LLMBridge(None)
    bridge.config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=2, normalization="RMSNorm", qk_layernorm=True)
    import torch

    if not torch.distributed.is_initialized():
        from tio_megatron.testing import run_ranks

        def of_layers(rank):
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(1, 1)
            spec = bridge._get_transformer_layer_spec()
            return spec.layer_norm is WrappedTorchNorm, spec.layer_specs[0].submodules.self_attention.submodules.linear_qkv.__name__

        assert run_ranks(1, of_layers) == [(True, "ColumnParallelLinear")]


def test_another_release_of_mbridge_is_named(mbridge):
    sys.modules["mbridge.core.llm_bridge"].LLMBridge = Bridge
    with pytest.raises(MovedSymbolError, match="mbridge 0.15.1"):
        local_layers.enable()

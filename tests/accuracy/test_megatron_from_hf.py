"""A checkpoint written by transformers means the same model to stock Megatron: fp32 log-probabilities agree to rounding."""

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Layout
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
from tio_megatron.integrations.megatron.weights.transfer import load_weights
from tio_megatron.testing import run_ranks

transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=16)
SIZES |= dict(intermediate_size=96, max_position_embeddings=128, rms_norm_eps=1e-6, rope_theta=1e6, initializer_range=0.2)
MOE = dict(moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3, decoder_sparse_step=1, mlp_only_layers=[])


def logits(rank, path, layout, tokens):
    with cpu_device.enabled(), Checkpoint(path) as checkpoint, torch.no_grad():
        parallel_state.initialize_model_parallel(layout.tp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.expert_tp)
        tensor_parallel.random.model_parallel_cuda_manual_seed(1)
        config = checkpoint.config
        model = gpt_model(config, transformer_config(config, layout), vocab_size=padded_vocab(config, layout)).eval()
        load_weights(model, checkpoint)
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        out = model(tokens, torch.arange(length)[None], mask)
        return tensor_parallel.gather_from_tensor_model_parallel_region(out)[..., : config.shape.vocab]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2, etp=1)], ids=str)
@pytest.mark.parametrize("kind", ["renormalised", "not renormalised", "dense", "tied"])
def test_stock_megatron_agrees_with_transformers(kind, layout, tmp_path):
    torch.manual_seed(0)
    if kind == "dense":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
        layout = Layout(tp=layout.tp)
    else:
        fields = SIZES | MOE | {"norm_topk_prob": kind != "not renormalised", "tie_word_embeddings": kind == "tied"}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))
    model = model.float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)
    for got in run_ranks(layout.tp, logits, tmp_path, layout, tokens):
        assert (got.log_softmax(-1) - expected).abs().max() < 2e-5

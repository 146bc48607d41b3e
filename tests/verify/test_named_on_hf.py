"""Changes of a transformers model that people make without knowing: the diagnosis was not written beside this model, and names them all the same."""

import pytest
import torch
import torch.nn.functional as F

from tio_megatron.integrations.transformers_models.recorder import load_hf, record_hf
from tio_megatron.testing.qwen3 import MOE, ragged, write_tiny
from tio_megatron.traces import open_trace
from tio_megatron.verify.diagnosis import diagnose

SIZES = dict(num_hidden_layers=2, hidden_size=96, vocab_size=300, num_attention_heads=4, num_key_value_heads=2)
SEQUENCES = ragged((21, 9, 34), vocab=300)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """{dtype: (checkpoint, trace of the model as it is)}"""
    folder = tmp_path_factory.mktemp("hf")
    found = {}
    for dtype in ("bfloat16", "float32"):
        path = write_tiny(folder / dtype, MOE, **SIZES, torch_dtype=dtype)
        record_hf(load_hf(path), SEQUENCES, folder / f"{dtype}.trace", keep=["all"], full_vocab=True)
        found[dtype] = (path, folder / f"{dtype}.trace")
    return found


def module(model, name):
    return dict(model.named_modules())[name]


def forward(name, function):
    def change(model):
        target = module(model, name)
        target.forward = function.__get__(target)

    return change


def parameter(name, function):
    def change(model):
        weight = dict(model.named_parameters())[name]
        weight.data.copy_(function(weight.data))

    return change


def frequencies(function):
    return lambda model: model.model.rotary_emb.inv_freq.copy_(function(model.model.rotary_emb.inv_freq))


def layer_norm(self, x):
    return F.layer_norm(x.float(), (x.shape[-1],), self.weight.float(), None, self.variance_epsilon).to(x.dtype)


def norm(x, weight):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), 1e-6).to(x.dtype)


def two_ranks(self, x):
    return sum(F.linear(a, w) for a, w in zip(x.chunk(2, -1), self.weight.chunk(2, -1), strict=True))


def sigmoid(self, x):
    logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
    chosen, ids = logits.float().sigmoid().topk(self.top_k, -1)
    return logits, (chosen / chosen.sum(-1, keepdim=True)).to(logits.dtype), ids


def old_copy(model):
    target = module(model, "model.layers.1.self_attn.v_proj")
    old = target.weight.data * (1 + 0.1 * torch.randn(target.weight.shape, generator=torch.Generator().manual_seed(0)).to(target.weight.dtype))
    target.forward = lambda x: F.linear(x, old)


def dropout_in_attention(model):
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2


def dropout_behind_experts(model):
    module(model, "model.layers.1.mlp").register_forward_hook(lambda _m, _a, out: F.dropout(out, 0.1, True))


def positions_from_one(model):
    model.model.rotary_emb.register_forward_pre_hook(lambda _m, a, k: (a, k | {"position_ids": k["position_ids"] + 1}), with_kwargs=True)


def no_number(model):
    def hook(_module, _args, out):
        out = out.clone()
        out.view(-1, out.shape[-1])[3] = float("nan")
        return out

    module(model, "model.layers.0.mlp").register_forward_hook(hook)


def swap_k_and_v(model):
    k, v = (module(model, f"model.layers.1.self_attn.{name}_proj").weight.data for name in "kv")
    held = k.clone()
    k.copy_(v)
    v.copy_(held)


def bias(model):
    module(model, "model.layers.1.self_attn.o_proj").register_forward_hook(lambda _, x, y: y + 0.05 * torch.linspace(-1, 1, y.shape[-1]).to(y.dtype))


def one_token(model):
    def change(_, x, y):
        y = y.clone()
        y[:, 3, 7] += 0.05
        return y

    module(model, "model.layers.1.self_attn.o_proj").register_forward_hook(change)


CASES = {
    "a bias": ("float32", bias, "unknown", "", "layers.1.o_proj"),
    "one element": ("float32", one_token, "unknown", "", "layers.1.o_proj"),
    "norm cast": ("bfloat16", forward("model.norm", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)), "framework", "norm-cast", "final_norm"),
    "layer norm": ("float32", forward("model.layers.1.input_layernorm", layer_norm), "framework", "norm-mean", "layers.1.attn_norm"),
    "theta": ("bfloat16", frequencies(lambda f: 1 / 500000 ** (torch.arange(0, 32, 2) / 32)), "framework", "rope-theta", "layers.0.q_rope"),
    "bf16 frequencies": ("bfloat16", frequencies(lambda f: f.bfloat16().float()), "framework", "rope-table", "layers.0.q_rope"),
    "scale": ("float32", lambda m: setattr(module(m, "model.layers.1.self_attn"), "scaling", 1 / 32), "framework", "attention-scale", "layers.1.attn"),
    "attention dropout": ("float32", dropout_in_attention, "framework", "dropout", "layers.0.attn"),
    "dropout": ("bfloat16", dropout_behind_experts, "framework", "dropout", "layers.1.mlp_out"),
    "gelu": (
        "float32",
        lambda m: setattr(module(m, "model.layers.0.mlp.experts"), "act_fn", torch.nn.GELU()),
        "framework",
        "activation",
        "layers.0.expert_act",
    ),
    "no norm_topk_prob": (
        *("bfloat16", lambda m: setattr(module(m, "model.layers.1.mlp.gate"), "norm_topk_prob", False)),
        *("framework", "router-normalise", "layers.1.expert_probs"),
    ),
    "sigmoid": ("bfloat16", forward("model.layers.1.mlp.gate", sigmoid), "framework", "router-softmax", "layers.1.expert_probs"),
    "two ranks": ("bfloat16", forward("model.layers.1.self_attn.o_proj", two_ranks), "order", "order", "layers.1.o_proj"),
    "old copy": ("bfloat16", old_copy, "weights", "stale-copy", "layers.1.v_proj"),
    "fp8": (
        *("bfloat16", parameter("model.layers.1.self_attn.o_proj.weight", lambda w: w.to(torch.float8_e4m3fn).to(w.dtype))),
        *("weights", "weights-dtype", "layers.1.o_proj"),
    ),
    "k and v": ("float32", swap_k_and_v, "weights", "weights-moved", "layers.1.k_proj"),
    "no expert": (
        *("bfloat16", parameter("model.layers.0.mlp.experts.down_proj", lambda w: w * (torch.arange(len(w)) != 5)[:, None, None])),
        *("weights", "weights-missing", "layers.0.expert_out"),
    ),
    "half a norm": ("float32", forward("model.layers.1.input_layernorm", lambda self, x: norm(x, self.weight) / 2), "framework", "scale", "layers.1.attn_norm"),
    "positions": ("bfloat16", positions_from_one, "framework", "positions", "positions"),
    "NaN": ("float32", no_number, "framework", "unwritten", "layers.0.mlp_out"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_named(name, recorded, tmp_path):
    dtype, change, kind, cause, point = CASES[name]
    path, trace = recorded[dtype]
    torch.manual_seed(1)
    model = load_hf(path)
    change(model)
    record_hf(model, SEQUENCES, tmp_path / "b", keep=["all"], full_vocab=True)
    found = diagnose(open_trace(trace), open_trace(tmp_path / "b"))
    assert (found.kind, found.cause, found.point) == (kind, cause, point), found
    if name == "two ranks":
        assert "2 pieces" in found.details["order_b"]

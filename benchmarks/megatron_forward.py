"""Megatron's forward with and without the plug-in: Qwen3-30B-A3B widths, 2 layers, one thread, 2 sequences of 256 tokens.

The vocabulary is cut to 32768 so that two models fit in memory side by side; everything else has the true sizes.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.alternate import ROOT, Engine, medians, serve

LAYERS, VOCAB, TOKENS, SEQUENCES, REPEATS = 2, 32768, 256, 2, 3
AGAINST = (
    ("stock bfloat16", "bfloat16", {}, 0.4),
    ("stock bfloat16 without bf16 instructions", "bfloat16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, 0.4),
    ("stock float32", "float32", {}, 1.0),
)
"""Name, dtype, environment and goal. The second row is what stock does on a processor without bf16 instructions, on one that has them."""


def configuration(dtype: str, experts: int = 128):
    """Qwen3-30B-A3B's own sizes with fewer layers and a smaller vocabulary."""
    from tio_megatron.checkpoint import CheckpointConfig

    return CheckpointConfig.from_dict(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": LAYERS,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "vocab_size": VOCAB,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 4096,
            "dtype": dtype,
        }
    )


def child(side: str, dtype: str) -> None:
    """One engine: builds the model, then times a forward per request."""
    import os

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    import tempfile

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import tio_megatron as tio
    from tio_megatron.integrations.megatron import cpu_device
    from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config

    torch.set_num_threads(1)
    meeting = tempfile.TemporaryDirectory()  # every later group meets in it too, so it stays until the process ends
    dist.init_process_group("gloo", init_method=f"file://{meeting.name}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    cpu_device.enable()
    model_parallel_cuda_manual_seed(1)
    contract = tio.Contract() if side == "ours" else None
    if contract:
        tio.apply(contract, vocab_size=VOCAB)
    config, layout = configuration(dtype), tio.Layout()
    model = gpt_model(config, transformer_config(config, layout), vocab_size=padded_vocab(config, layout, contract)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0) if weight.dim() == 1 else weight.copy_(torch.empty_like(weight, dtype=torch.float32).uniform_(-0.05, 0.05, generator=generator))
    tokens = torch.randint(0, VOCAB, (SEQUENCES, TOKENS + 1), generator=generator)
    positions = torch.arange(TOKENS)[None]
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(rows[:, :-1].contiguous(), positions.expand(len(rows), -1), mask, labels=rows[:, 1:].contiguous())

    def forward(_request: object) -> dict:
        start = time.perf_counter()
        loss(tokens)
        return {"seconds": time.perf_counter() - start}

    together, alone = loss(tokens), torch.cat([loss(row[None]) for row in tokens])
    equal = together.float().numpy().tobytes() == alone.float().numpy().tobytes()
    serve(forward, {"bytes_equal": equal, "mean": together.float().mean().item()})


def rows() -> list[dict]:
    """Our bf16 forward against stock bf16 and against stock fp32."""
    logs = ROOT / "out" / "bench" / "logs"
    found = []
    for against, dtype, environment, goal in AGAINST:
        with Engine("ours", "benchmarks.megatron_forward", ["ours", "bfloat16"], logs) as ours:
            equal = ours.ask()["bytes_equal"]
            with Engine(against, "benchmarks.megatron_forward", ["stock", dtype], logs, environment) as stock:
                stock.ask()
                times = medians({"ours": ours, "stock": stock}, "forward", REPEATS)
        ratio = times["ours"] / times["stock"] if equal else None
        name = f"Megatron forward, ours bf16 / {against}"
        found.append({"name": name, "ratio": ratio, "goal": goal, "met": ratio is not None and ratio <= goal, "note": f"{SEQUENCES} x {TOKENS} tokens"})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", nargs="?", choices=("ours", "stock"))
    parser.add_argument("dtype", nargs="?", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    if options.side:
        child(options.side, options.dtype)
    else:
        for row in rows():
            print(row)

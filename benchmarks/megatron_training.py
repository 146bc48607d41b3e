"""A training step of Megatron with and without the plug-in: forward, backward and Adam at Qwen3-30B-A3B's widths, one thread.

2 layers, 32 experts and a vocabulary of 32768, so that two optimizers fit in memory side by side; 2 sequences of 256 tokens. Also peak memory, and the
bytes that a gradient reduction moves.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.alternate import ROOT, Engine, medians, serve
from benchmarks.megatron_forward import configuration

VOCAB, EXPERTS, TOKENS, SEQUENCES, REPEATS = 32768, 32, 256, 2, 3
AGAINST = (
    ("stock bfloat16", "bfloat16", {}, 0.6),
    ("stock bfloat16 without bf16 instructions", "bfloat16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, 0.6),
    ("stock float32", "float32", {}, 1.25),
)
"""Name, dtype, environment and goal of the time."""


def child(side: str, dtype: str) -> None:
    """One engine: builds model and optimizer, then times a step per request."""
    import hashlib
    import os
    import resource

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    import tempfile

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import tio_megatron as tio
    from tio_megatron.integrations.megatron import cpu_device
    from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config

    torch.set_num_threads(1)
    meeting = tempfile.TemporaryDirectory()
    dist.init_process_group("gloo", init_method=f"file://{meeting.name}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    cpu_device.enable()
    model_parallel_cuda_manual_seed(1)
    contract = tio.Contract() if side == "ours" else None
    if contract:
        tio.apply(contract, vocab_size=VOCAB)
    config, layout = configuration(dtype, experts=EXPERTS), tio.Layout()
    megatron = transformer_config(config, layout, calculate_per_token_loss=True, finalize_model_grads_func=finalize_model_grads)
    bare = gpt_model(config, megatron, vocab_size=padded_vocab(config, layout, contract))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in bare.parameters():
            weight.fill_(1.0) if weight.dim() == 1 else weight.copy_(torch.empty_like(weight, dtype=torch.float32).uniform_(-0.05, 0.05, generator=generator))
    model = DistributedDataParallel(megatron, DistributedDataParallelConfig(grad_reduce_in_fp32=True), bare)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-5, bf16=dtype == "bfloat16", params_dtype=megatron.params_dtype), [model])
    megatron.grad_scale_func = optimizer.scale_loss
    tokens = torch.randint(0, VOCAB, (SEQUENCES, TOKENS + 1), generator=generator)
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)

    def forward(iterator, stage):
        rows = next(iterator)
        out = stage(rows[:, :-1].contiguous(), torch.arange(TOKENS).expand(len(rows), -1), mask, labels=rows[:, 1:].contiguous())
        return out, lambda losses: (losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {})

    def gradients(parts) -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=[model],
            num_microbatches=len(parts),
            seq_length=TOKENS,
            micro_batch_size=len(parts[0]),
            forward_only=False,
        )

    def step(_request: object) -> dict:
        start = time.perf_counter()
        gradients([tokens])
        optimizer.step()
        return {"seconds": time.perf_counter() - start, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}

    digests = []
    gradients([tokens])  # the grid of the next two follows from this one's largest partials
    for parts in ([tokens], list(tokens[:, None])) if contract else ([tokens],):
        gradients(parts)
        digests.append(hashlib.sha256(b"".join(p.main_grad.contiguous().view(torch.uint8).numpy().tobytes() for p in bare.parameters())).hexdigest())
    serve(step, {"bytes_equal": len(set(digests)) == 1})


def rows() -> list[dict]:
    """Time beside stock in three forms, peak memory, and bytes of the reduction."""
    logs = ROOT / "out" / "bench" / "logs"
    found = []
    for against, dtype, environment, goal in AGAINST:
        with Engine("ours training", "benchmarks.megatron_training", ["ours", "bfloat16"], logs) as ours:
            equal = ours.ask()["bytes_equal"]
            with Engine(f"{against} training", "benchmarks.megatron_training", ["stock", dtype], logs, environment) as stock:
                stock.ask()
                times = medians({"ours": ours, "stock": stock}, "step", REPEATS)
                peaks = [engine.ask("step")["peak"] for engine in (ours, stock)]
        ratio = times["ours"] / times["stock"] if equal else None
        note = f"{SEQUENCES} x {TOKENS} tokens; {times['ours']:.1f} s and {times['stock']:.1f} s"
        found.append({"name": f"training step, ours bf16 / {against}", "ratio": ratio, "goal": goal, "met": ratio is not None and ratio <= goal, "note": note})
        if dtype == "bfloat16" and not environment:
            memory = peaks[0] / peaks[1]
            note = f"{peaks[0]:.1f} GiB and {peaks[1]:.1f} GiB"
            found.append({"name": "training, peak memory, ours / stock bfloat16", "ratio": memory, "goal": 1.25, "met": memory <= 1.25, "note": note})
    moved = [reduced(side) for side in ("ours", "stock")]
    ratio = moved[0] / moved[1]
    note = f"{moved[0]} and {moved[1]} bytes given to collectives, a tiny model on 2 data-parallel ranks"
    found.append({"name": "gradient reduction, bytes, ours / stock fp32", "ratio": ratio, "goal": 2.1, "met": ratio <= 2.1, "note": note})
    return found


def reduced(side: str) -> int:
    """Bytes that one rank gives to collectives between the backward pass and the optimizer."""
    import tempfile
    from pathlib import Path

    from examples.qwen3_moe.training import Recipe, Training, parse
    from tio_megatron.contract import Contract
    from tio_megatron.testing import run_ranks
    from tio_megatron.testing.qwen3 import MOE, write_tiny

    def count(rank: int, path: Path) -> int:
        import torch.distributed as dist

        training = Training(Recipe(path, steps=3), parse("dp2", grouped=False), Contract() if side == "ours" else None)
        training.step()
        given = 0
        names = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
        stock = {name: getattr(dist, name) for name in names}
        finalize = training.megatron.finalize_model_grads_func

        def counted(call):
            def run(tensor, *rest, **more):
                nonlocal given
                whole = rest[0] if rest and hasattr(rest[0], "numel") else tensor
                given += whole.numel() * whole.element_size()
                return call(tensor, *rest, **more)

            return run

        def finalize_counted(*args, **more):
            for name in names:
                setattr(dist, name, counted(stock[name]))
            try:
                finalize(*args, **more)
            finally:
                for name in names:
                    setattr(dist, name, stock[name])

        training.megatron.finalize_model_grads_func = finalize_counted
        training.step()
        training.close()
        return given

    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, count, write_tiny(Path(folder) / "model", MOE), timeout=200)[0]


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

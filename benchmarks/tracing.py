"""What ``tio record`` costs: a forward with the tracer on beside one without it, digests of every point, and one afterwards, when nothing is hooked any more.

Two layers of a mixture of experts, one thread, 2 sequences of 256 tokens, bf16; each engine in a process of its own. Bytes with the tracer on are compared
with those without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("hf", "megatron stock", "megatron ours", "vllm stock", "vllm ours")
GOAL, REPEATS = 2.0, 3
SIZES = {"num_hidden_layers": 2, "hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 4096}


def rows() -> list[dict[str, Any]]:
    """Two rows for each engine."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as held:
        for engine in ENGINES:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tracing", engine, held]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{engine}: {done.stderr[-2000:]}")
            times = json.loads(done.stdout.strip().splitlines()[-1])
            on, off = times["traced"] / times["plain"], times["plain"] / times["never"]
            ratio = on if times["same"] else None
            note = f"{1000 * times['plain']:.0f} ms without, {1000 * times['traced']:.0f} ms with; {times['points']} points"
            found.append({"name": f"{engine}: tracer on", "ratio": ratio, "goal": GOAL, "met": bool(ratio and ratio < GOAL), "note": note})
            found.append({"name": f"{engine}: off again", "ratio": off, "goal": 1.05, "met": off < 1.05, "note": f"hooks left: {times['hooks']}"})
    return found


def child(engine: str, held: Path) -> dict[str, Any]:
    """Times of one engine."""
    import torch

    from tio_megatron.testing.qwen3 import MOE, ragged, write_tiny

    torch.set_num_threads(1)
    model = held / "model"
    if not model.exists():
        write_tiny(model, MOE, **SIZES)
    sequences = ragged((256, 256), vocab=SIZES["vocab_size"])
    name, _, way = engine.partition(" ")
    return {"hf": _hf, "megatron": _megatron, "vllm": _vllm}[name](model, sequences, held / engine.replace(" ", "-"), way == "stock")


def _times(plain: Any, traced: Any, folder: Path, hooks: Any) -> dict[str, Any]:
    from tio_megatron.traces import open_trace

    before = plain()
    times: dict[str, list[float]] = {"never": [], "plain": [], "traced": []}
    for _ in range(REPEATS):  # before any recording
        times["never"].append(_timed(plain))
    for i in range(REPEATS):  # by turns, so that a busy machine slows both
        times["traced"].append(_timed(lambda i=i: traced(folder / str(i))))
        times["plain"].append(_timed(plain))
    trace = open_trace(folder / "0")
    known = trace.values("logprob")
    same = plain() == before and known is not None and [value for value in known.tolist() if value] == [value for row in before for value in row if value]
    return {name: min(found) for name, found in times.items()} | {"same": same, "points": len(trace.names), "hooks": hooks()}


def _timed(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _hf(model: Path, sequences: list[list[int]], folder: Path, stock: bool) -> dict[str, Any]:
    import torch

    from tio_megatron.integrations.transformers_models.recorder import load_hf, record_hf

    built = load_hf(model)

    def plain() -> list[list[float]]:
        found = []
        with torch.no_grad():
            for sequence in sequences:
                table = built(input_ids=torch.tensor([sequence]), use_cache=False).logits[0].float().log_softmax(-1)
                found.append(table[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist())
        return found

    return _times(plain, lambda at: record_hf(built, sequences, at, weights=False, keep=["logprob"]), folder, lambda: _hooks(built))


def _hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _megatron(model: Path, sequences: list[list[int]], folder: Path, stock: bool) -> dict[str, Any]:
    import contextlib

    import torch.distributed as dist

    import tio_megatron
    from tio_megatron.checkpoint import Checkpoint
    from tio_megatron.contract import Contract, Layout
    from tio_megatron.integrations.megatron import cpu_device
    from tio_megatron.integrations.megatron.recording.recorder import record_megatron
    from tio_megatron.integrations.megatron.scoring.logprobs import token_logprobs
    from tio_megatron.integrations.megatron.scoring.stock_scoring import stock_logprobs
    from tio_megatron.integrations.megatron.scoring.tracing import parallel
    from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
    from tio_megatron.integrations.megatron.weights.transfer import load_weights

    with contextlib.ExitStack() as stack, Checkpoint(model) as checkpoint, tempfile.TemporaryDirectory() as meeting:
        stack.enter_context(cpu_device.enabled())
        dist.init_process_group("gloo", init_method=f"file://{meeting}/rendezvous", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(parallel(Layout()))
        config, contract = checkpoint.config, None if stock else Contract()
        if contract is not None:
            stack.enter_context(tio_megatron.apply(contract, vocab_size=config.shape.vocab))
        settings = transformer_config(config, Layout(), calculate_per_token_loss=True)
        built = gpt_model(config, settings, vocab_size=padded_vocab(config, Layout(), contract)).eval()
        load_weights(built, checkpoint)

        def plain() -> list[list[float]]:
            if stock:
                return stock_logprobs(built, sequences, config.shape.vocab)
            scores = token_logprobs(built, sequences, batch=1)
            assert scores is not None
            return [row.tolist() for row in scores.logprobs]

        return _times(plain, lambda at: record_megatron(built, config, sequences, at, weights=False, keep=["logprob"]), folder, lambda: _hooks(built))


def _vllm(model: Path, sequences: list[list[int]], folder: Path, stock: bool) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    from tio_megatron.checkpoint import CheckpointConfig
    from tio_megatron.integrations.vllm import engine_options
    from tio_megatron.integrations.vllm.recording.recorder import KV_BYTES, WORKER, record_vllm
    from tio_megatron.integrations.vllm.tracing import engine, prompt_logprobs

    options: dict[str, Any] = {"enforce_eager": True, "dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 257, "enable_prefix_caching": False}
    options |= {"max_logprobs": -1, "block_size": 64, "kv_cache_memory_bytes": KV_BYTES, "worker_extension_cls": WORKER}
    llm = engine(str(model), **(options if stock else engine_options(**options)))
    config = CheckpointConfig.from_file(model / "config.json")

    def plain() -> list[list[float]]:
        tables = [prompt_logprobs(llm, sequence, 0) for sequence in sequences]
        return [[row[token] for row, token in zip(table[1:], sequence[1:], strict=True)] for table, sequence in zip(tables, sequences, strict=True)]

    return _times(plain, lambda at: record_vllm(llm, config, sequences, at, weights=False, keep=["logprob"]), folder, lambda: llm.apply_model(_hooks)[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("held", type=Path)
    options = parser.parse_args()
    print(json.dumps(child(options.engine, options.held)))
    sys.stdout.flush()
    os._exit(0)

"""DeepSpeed on its CPU accelerator with and without the contract, two ranks of one thread each: AutoTP's linears, the MoE layer, ZeRO-1 and ZeRO-2.

    make bench-deepspeed                     (in an environment of its own, .venv-deepspeed)

Ratios are ours divided by stock, whose engines answer by turns; every engine is two processes, of which the first starts the second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.alternate import Engine, serve  # noqa: E402

HIDDEN, WIDTH, EXPERTS, SEQUENCES, LENGTH, REPEATS = 512, 2048, 8, 2, 256, 7
CASES = {
    "AutoTP 2: column and row linear, forward and backward": {"tp": 2, "part": "passes"},
    "MoE layer, EP 2, 8 experts, k = 2: forward and backward": {"ep": 2, "part": "passes"},
    "ZeRO-1, DP 2: whole step of two micro-batches": {"stage": 1, "micro_batches": 2, "part": "all"},
    "ZeRO-2, DP 2: whole step of two micro-batches": {"stage": 2, "micro_batches": 2, "part": "all"},
    "ZeRO-1, DP 2: engine.step() alone": {"stage": 1, "part": "step"},
    "ZeRO-2, DP 2: engine.step() alone": {"stage": 2, "part": "step"},
}


def rank_main(case: dict[str, Any]) -> None:
    """One rank: builds the engine; the first answers the parent and tells the second what to do."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{case['meeting']}", rank=rank, world_size=2)
    answers = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed prints while it builds
    run = _engine(case)
    os.dup2(answers, 1)
    if rank:
        while _told(None):
            run()
        return

    def answer(request: Any) -> dict[str, float]:
        _told(True)
        return {"seconds": run()}

    serve(answer, {"ready": True})
    _told(False)


def _told(go: bool | None) -> bool:
    import torch
    import torch.distributed as dist

    word = torch.tensor(int(bool(go)))
    dist.broadcast(word, src=0)
    return bool(word)


def _engine(case: dict[str, Any]) -> Any:
    """A function that takes one step and returns the seconds of the part of it that the case is about."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import tio_megatron as tio

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first; stock takes gloo then, as on several machines
    if case["ours"]:
        tio.apply()
    torch.manual_seed(1)
    model = _model(case)
    tp, micro_batches = case.get("tp", 1), case.get("micro_batches", 1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case.get("stage", 1)},
        "steps_per_print": 1000000,
    }
    if case["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if tp > 1:
        rows = {"patterns": [".*down_proj\\.weight$"], "partition_type": "row"}
        columns = {"patterns": [".*up_proj\\.weight$"], "partition_type": "column"}
        config["tensor_parallel"] = {"autotp_size": tp, "partition_config": {"use_default_specs": False, "layer_specs": [rows, columns]}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
    x = torch.randn(SEQUENCES, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank() // tp)).to(dtype)

    def run() -> float:
        passes = stepping = 0.0
        for _ in range(micro_batches):
            dist.barrier()
            start = time.perf_counter()
            engine.backward(engine(x).float().square().mean())
            dist.barrier()
            half = time.perf_counter()
            engine.step()
            dist.barrier()
            passes, stepping = passes + half - start, stepping + time.perf_counter() - half
        return {"passes": passes, "step": stepping, "all": passes + stepping}[case["part"]]

    return run


def _model(case: dict[str, Any]) -> Any:
    import torch
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self, width: int = WIDTH) -> None:
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(HIDDEN, width, bias=False), nn.Linear(width, HIDDEN, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(nn.functional.silu(self.up_proj(x)))

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            from deepspeed.moe.layer import MoE

            options = {"drop_tokens": False, "min_capacity": 0, "use_rts": False, "top2_2nd_expert_sampling": False}
            self.moe = MoE(HIDDEN, Mlp(WIDTH // 4), num_experts=EXPERTS, ep_size=case["ep"], k=2, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.moe(x)[0]

    return Sparse() if "ep" in case else nn.Sequential(Mlp(), Mlp())


def child(case: dict[str, Any]) -> None:
    """The first rank, which starts the second."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "benchmarks.deepspeed_engine", "--rank", json.dumps(case)]
    second = subprocess.Popen(command, env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"}, stdout=2, cwd=ROOT)
    try:
        rank_main(case)
        second.wait(timeout=60)
    finally:
        second.kill()
        second.wait()


def ratio(case: dict[str, Any], repeats: int, logs: Path) -> dict[str, float]:
    """Median seconds of both sides, and the median of the ratios of neighbours in time."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for side in ("stock", "ours"):
            given = {**case, "ours": side == "ours", "meeting": f"{folder}/{side}"}
            sides[side] = Engine(side, "benchmarks.deepspeed_engine", ["--child", json.dumps(given)], logs)
        with sides["stock"], sides["ours"]:
            for engine in sides.values():
                engine.ask()
            pairs = [{side: engine.ask("step")["seconds"] for side, engine in sides.items()} for _ in range(repeats + 1)][1:]
    found = {side: statistics.median(pair[side] for pair in pairs) for side in sides}
    return found | {"ratio": statistics.median(pair["ours"] / pair["stock"] for pair in pairs)}


def main() -> int:
    """The table, also into ``out/bench/deepspeed.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return 0
    if options.rank:
        rank_main(options.rank)
        return 0
    out = ROOT / "out" / "bench"
    rows = []
    print(f"{'ours / stock, two ranks of one thread':60}  bf16  fp32", flush=True)
    for name, case in CASES.items():
        found = {dtype: ratio({**case, "dtype": dtype}, options.repeats, out / "deepspeed_logs") for dtype in ("bf16", "fp32")}
        print(f"{name:60}  {found['bf16']['ratio']:4.2f}  {found['fp32']['ratio']:4.2f}", flush=True)
        rows.append({"name": name, **found})
    (out / "deepspeed.json").write_text(json.dumps({"rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

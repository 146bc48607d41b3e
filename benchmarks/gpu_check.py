"""What to run on the day there is a GPU (sm_90), in some minutes: `python benchmarks/gpu_check.py`. Built, not run: no GPU has seen it yet.

1. The tests of ``tests/triton_kernels`` on the device: the bytes of whatever is cut, batched, paged or chunked otherwise, and of the references.
2. One card, one model: trainer TP 2 EP 2 with sequence parallelism as two processes on the card, whose bytes gloo moves by way of the host, against a
   paged rollout at TP 1; one layer with the widths of Qwen3-30B-A3B; and the decoder of plain torch beside it, whole and token by token.
3. Time beside cuBLAS and SDPA, by turns; a row whose bytes depend on the number of rows carries no ratio.

Exit status 0 if all bytes agree. ``--rehearse`` runs step 2 small, on the CPU with the CPU's kernels: it shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks import one_card  # noqa: E402
from tio_megatron import kernels  # noqa: E402
from tio_megatron.contract import Contract  # noqa: E402
from tio_megatron.testing import assert_same_bytes, run_ranks  # noqa: E402

FULL, SMALL = one_card.Shape(), one_card.Shape(layers=2, hidden=64, heads=4, kv_heads=2, head=32, experts=8, top_k=2, ffn=32, vocab=300)
SEED = 1


def main(argv: list[str] | None = None) -> int:
    """Run the steps, print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="step 2 alone, small, on the CPU")
    parser.add_argument("--tokens", type=int, default=300, help="length of the sequence of step 2")
    options = parser.parse_args(argv)
    if options.rehearse:
        return 0 if one_model("cpu", "cpu", SMALL, min(options.tokens, 40)) else 1
    if not torch.cuda.is_available() or torch.version.cuda is None or torch.cuda.get_device_capability() != (9, 0):
        print("this check needs one GPU of compute capability 9.0 and torch with CUDA; --rehearse runs a part of it on the CPU", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels {kernels.version('triton-sm90')}")
    passed = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/triton_kernels", "--kernels-on", "cuda"], cwd=ROOT).returncode == 0
    agreed = one_model("cuda", "triton-sm90", FULL, options.tokens)
    kernels.load("triton-sm90")
    ratios()
    print(f"tests of the kernels: {'passed' if passed else 'FAILED'}; one model: {'logdiff 0' if agreed else 'BYTES DIFFER'}")
    return 0 if passed and agreed else 1


def trainer_rank(rank: int, device: str, family: str, shape: one_card.Shape, ids: list[int]) -> torch.Tensor:
    """One trainer rank of the default group, on the one card."""
    kernels.load(family)
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    with torch.no_grad():
        return one_card.train_scores(shape, shape.weights(SEED, device), torch.tensor(ids, device=device), Contract(family=family), group).cpu()


def one_model(device: str, family: str, shape: one_card.Shape, tokens: int) -> bool:
    """Step 2; whether all bytes agree."""
    ids = [i * 7919 % shape.vocab for i in range(tokens)]
    kernels.load(family)
    contract, prompt = Contract(family=family), tokens // 2
    trainers = {
        "TP 1": run_ranks(1, trainer_rank, device, family, shape, ids, timeout=600, start="spawn"),
        "TP 2 EP 2 SP": run_ranks(2, trainer_rank, device, family, shape, ids, timeout=600, start="spawn"),
    }
    weights, own = shape.weights(SEED, device), torch.tensor(ids, device=device)
    with torch.no_grad():
        rollout = one_card.rollout_scores(shape, weights, own, contract, prompt, chunk=max(1, prompt // 3)).cpu()
        stock = [one_card.stock_scores(shape, weights, own, step).cpu() for step in (tokens, 1)]
    agreed = True
    for name, ranks in trainers.items():
        differ = max(int((one != rollout).sum()) for one in ranks)
        worst = max(float((one - rollout).abs().max()) for one in ranks)
        print(f"tio    {name:<13} rollout TP 1, paged   {len(rollout):>6} tokens {differ:>6} differ   max |logdiff| {worst:.3g}")
        for one in ranks:
            agreed = agreed and _same(one, rollout)
    differ, worst = int((stock[0] != stock[1]).sum()), float((stock[0] - stock[1]).abs().max())
    print(f"stock  {'whole':<13} token by token        {len(rollout):>6} tokens {differ:>6} differ   max |logdiff| {worst:.3g}")
    return agreed


def ratios() -> None:
    """Step 3: time of ours divided by time of stock."""
    from tio_megatron.kernels import attention, grouped, linear

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    for n, k, leaves in ((5120, 2048, 1), (2048, 4096, 4), (151936, 2048, 1)):
        w, x = bf16(n, k), bf16(4096, k)
        whole = linear.linear(x, w, leaves=leaves)
        for m in (1, 8, 64, 512, 4096):
            rows = x[:m]
            same = _same(linear.linear(rows, w, leaves=leaves), whole[:m])
            show(f"product {m} x {n} x {k}", same, lambda r=rows, w=w, n=leaves: linear.linear(r, w, leaves=n), lambda r=rows, w=w: F.linear(r, w))
    w, x = bf16(128, 1536, 2048), bf16(8192, 2048)
    for rows in (128, 8192):
        offsets = torch.arange(129, device="cuda") * (rows // 128)
        experts, part = list(w.unbind()), x[:rows]
        alone = linear.linear(part[: rows // 128], experts[0], leaves=1)
        show(
            f"grouped {rows} rows, 128 experts",
            _same(grouped.grouped_linear(part, experts, offsets, leaves=1)[: rows // 128], alone),
            lambda p=part, o=offsets, e=experts: grouped.grouped_linear(p, e, o, leaves=1),
            lambda p=part, r=rows: torch.bmm(p.view(128, r // 128, 2048), w.transpose(1, 2)),
        )
    for tokens in (512, 4096):
        q, k, v = bf16(tokens, 32, 128), bf16(tokens, 4, 128), bf16(tokens, 4, 128)
        cu = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
        o, _ = attention.attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.088)
        last = attention.attention(q[-1:], k, v, cu_q=torch.tensor([0, 1], dtype=torch.int32, device="cuda"), cu_k=cu, scale=0.088)[0]
        heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
        show(
            f"attention {tokens} tokens",
            _same(last, o[-1:]),
            lambda q=q, k=k, v=v, cu=cu: attention.attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.088),
            lambda h=heads: F.scaled_dot_product_attention(*h, is_causal=True, scale=0.088, enable_gqa=True),
        )


def show(what: str, same: bool, ours: Callable[[], object], stock: Callable[[], object]) -> None:
    """One row of step 3."""
    print(f"{what:<34} " + (f"{timed(ours, stock):6.2f}" if same else "bytes differ"))


def timed(ours: Callable[[], object], stock: Callable[[], object], rounds: int = 20) -> float:
    """Median over rounds by turns of ours / stock."""
    found = []
    for _ in range(rounds):
        seconds = []
        for run in (ours, stock):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run()
            start.record()
            for _ in range(5):
                run()
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop))
        found.append(seconds[0] / seconds[1])
    return statistics.median(found)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        assert_same_bytes(a, b)
    except AssertionError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

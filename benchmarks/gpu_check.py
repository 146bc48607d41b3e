"""What to run on the day there is a GPU (sm_90), in some minutes: `python benchmarks/gpu_check.py`. Built, not run: no GPU has seen it yet.

* ``layers``: one card, our layers and kernels alone: trainer TP 2 EP 2 with sequence parallelism as two processes on the card, whose bytes gloo moves by
  way of the host, against a paged rollout at TP 1; one layer with the widths of Qwen3-30B-A3B.
* ``job``: the main job on that card, with the same widths: megatron-core under the contract at TP 1 and at TP 2 EP 2, which scores and trains, against
  our rollout kernels at TP 1, in rounds; the weights after it; and, as a control that must differ, stock megatron-core beside plain torch token by token.
* ``tests``: those of ``tests/triton_kernels`` on the device: the bytes of whatever is cut, batched, paged or chunked otherwise, and of the references.
* ``speed``: time beside cuBLAS and SDPA, by turns; a row whose bytes depend on the number of rows carries no ratio.

Every line is in ``out/gpu/report.txt`` as soon as it is known; a step that fails or takes longer than ``--limit`` does not keep the next from running.
Exit status 0 if all bytes agree, 1 if not, 2 where there is no such GPU. ``--rehearse`` runs ``layers`` and ``job`` small, on the CPU with the CPU's
kernels: it shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks import main_job, one_card  # noqa: E402
from tio_megatron import kernels  # noqa: E402
from tio_megatron.contract import Contract  # noqa: E402
from tio_megatron.testing import assert_same_bytes, run_ranks  # noqa: E402

FULL, SMALL = one_card.Shape(), one_card.Shape(layers=2, hidden=64, heads=4, kv_heads=2, head=32, experts=8, top_k=2, ffn=32, vocab=300)
SMALL_MODEL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
LAYOUTS = {"TP 1": "tp1", "TP 2 EP 2 SP": "tp2+ep2+sp"}
STEPS = ("layers", "job", "tests", "speed")
SEED = 1


class Report:
    """Lines on the screen and in a file, each as soon as it is known."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "report.txt"
        self.file.write_text("")

    def say(self, line: str) -> None:
        """One line."""
        print(line, flush=True)
        with self.file.open("a") as file:
            file.write(line + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the steps, print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="layers and job alone, small, on the CPU")
    parser.add_argument("--steps", default=",".join(STEPS), help="which, by commas (default: all, %(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="length of the sequence of layers")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one process of a step (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="where report.txt and the model go (default: out/gpu)")
    options = parser.parse_args(argv)
    steps = options.steps.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.exit(2, f"gpu_check: --steps: {', '.join(sorted(unknown))} is none of {', '.join(STEPS)}\n")
    if options.tokens < 2:
        parser.exit(2, f"gpu_check: --tokens must be at least 2, got {options.tokens}: a prompt and what follows it\n")
    if not options.limit > 0:
        parser.exit(2, f"gpu_check: --limit must be a number of seconds above 0, got {options.limit:g}\n")
    if not options.rehearse and (not torch.cuda.is_available() or torch.version.cuda is None or torch.cuda.get_device_capability() != (9, 0)):
        print("this check needs one GPU of compute capability 9.0 and torch with CUDA; --rehearse runs a part of it on the CPU", file=sys.stderr)
        return 2
    device, family = ("cpu", "cpu") if options.rehearse else ("cuda", "triton-sm90")
    report = Report(options.out)
    name = "rehearsal on the CPU: says nothing about a GPU" if options.rehearse else torch.cuda.get_device_name()
    report.say(f"{name}, torch {torch.__version__}, kernels {kernels.version(family)}")
    shape, tokens = (SMALL, min(options.tokens, 40)) if options.rehearse else (FULL, options.tokens)
    do: dict[str, Callable[[], bool]] = {
        "layers": lambda: layers(report, device, family, shape, tokens, options.limit),
        "job": lambda: job(report, device, family, options.out, options.limit),
        "tests": lambda: kernel_tests(options.limit),
        "speed": lambda: ratios(report, family),
    }
    found = {}
    for step in STEPS:
        if step in steps and (step in ("layers", "job") or not options.rehearse):
            began = time.monotonic()
            try:
                found[step] = do[step]()
            except Exception:  # one step must not keep the others from a card that is there for minutes
                report.say(traceback.format_exc())
                found[step] = False
            report.say(f"{step}: {'passed' if found[step] else 'FAILED'} after {time.monotonic() - began:.0f} s")
    return 0 if all(found.values()) else 1


def kernel_tests(limit: float) -> bool:
    """The kernels' tests on the device."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/triton_kernels", "--kernels-on", "cuda"], cwd=ROOT, timeout=limit).returncode == 0


def row(report: Report, side: str, trainer: str, rollout: str, found: tuple[int, int, float]) -> None:
    """One comparison."""
    tokens, differ, worst = found
    report.say(f"{side:<6} {trainer:<13} {rollout:<27} {tokens:>6} tokens {differ:>6} differ   max |logdiff| {worst:.3g}")


def trainer_rank(rank: int, device: str, family: str, shape: one_card.Shape, ids: list[int]) -> torch.Tensor:
    """One trainer rank of the default group, on the one card."""
    kernels.load(family)
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    with torch.no_grad():
        return one_card.train_scores(shape, shape.weights(SEED, device), torch.tensor(ids, device=device), Contract(family=family), group).cpu()


def layers(report: Report, device: str, family: str, shape: one_card.Shape, tokens: int, limit: float) -> bool:
    """Our layers alone; whether all bytes agree."""
    ids = [i * 7919 % shape.vocab for i in range(tokens)]
    kernels.load(family)
    contract, prompt = Contract(family=family), tokens // 2
    weights, own = shape.weights(SEED, device), torch.tensor(ids, device=device)
    with torch.no_grad():
        rollout = one_card.rollout_scores(shape, weights, own, contract, prompt, chunk=max(1, prompt // 3)).cpu()
        stock = [one_card.stock_scores(shape, weights, own, step).cpu().tolist() for step in (tokens, 1)]
    agreed = True
    for number, name in enumerate(LAYOUTS):
        for one in run_ranks(number + 1, trainer_rank, device, family, shape, ids, timeout=limit, start="spawn"):
            agreed = agreed and _same(one, rollout)
            found = main_job.compared(one.tolist(), rollout.tolist())
        row(report, "tio", name, "rollout TP 1, paged", found)
    row(report, "torch", "whole", "token by token", main_job.compared(*stock))
    return agreed


def job(report: Report, device: str, family: str, out: Path, limit: float) -> bool:
    """The main job; whether every log-probability and every weight agrees, and the control does not."""
    from examples.qwen3_moe import makers

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # stock megatron-core asks for it
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # and warns of the packages that it does without
    small = device == "cpu"
    config = makers.slice_config(1, experts=8, vocab=256) | SMALL_MODEL if small else makers.slice_config(1)
    model = out / f"model-{makers.config_key(config)}"
    makers.make_random(model, config, SEED)
    report.say(f"job: {'a small model' if small else 'slice, one layer'}, made")
    sizes = {"samples": 3, "prompt": 12, "new": 6} if small else {"samples": 8, "prompt": 96, "new": 32}
    work = main_job.Work(model, device, family, **sizes)
    agreed, after, rounds = True, [], []
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        rounds, digests = run_ranks(number + 1, main_job.job, work, layout, timeout=limit, start="spawn")[0]
        after.append(digests)
        for at, one in enumerate(rounds):
            row(report, "tio", name, f"rollout TP 1, round {at}", one.logdiff)
            seconds = ", ".join(f"{what} {value:.1f}" for what, value in one.seconds.items())
            report.say(f"       loss {one.loss:.6g}, norm of the gradients {one.norm:.6g}; seconds: {seconds}")
            agreed = agreed and one.logdiff[1] == 0
    differ = [name for name, digest in after[0].items() if after[1][name] != digest]
    report.say(f"tio    weights after {work.rounds} steps of Adam: {len(differ)} of {len(after[0])} tensors differ between {' and '.join(LAYOUTS)}")
    control = main_job.compared(*run_ranks(1, main_job.stock, work, rounds[0].sequences, timeout=limit, start="spawn")[0])
    row(report, "stock", "TP 1", "torch, token by token", control)
    return agreed and not differ and control[1] > 0


def ratios(report: Report, family: str) -> bool:
    """Time of ours divided by time of stock; whether no row's bytes depend on the number of rows."""
    from tio_megatron.kernels import attention, grouped, linear

    kernels.load(family)
    held = True

    def show(what: str, same: bool, ours: Callable[[], object], stock: Callable[[], object]) -> None:
        nonlocal held
        held = held and same
        report.say(f"{what:<34} " + (f"{timed(ours, stock):6.2f}" if same else "bytes differ"))

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
    return held


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

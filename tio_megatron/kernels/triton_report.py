"""What the compiler makes of the Triton kernels for sm_90, without a GPU: ``python -m tio_megatron.kernels.triton_report [FILE]``.

Each kernel is compiled as its launcher would launch it at the shapes of Qwen3-30B-A3B, by Triton and the ``ptxas`` in its wheel. Nothing runs. A row says:
registers of a thread; bytes spilt; shared memory of a program; the matrix instruction; the fused multiply-adds that the kernel asks for; and two counts
that must be 0 in every kernel, or the command ends with status 1:

* ``loose``: float additions and products in PTX without an explicit rounding mode, which ``ptxas`` might fuse;
* ``inexact``: instructions that are not the IEEE operation rounded half to even: an approximation of any function (``div.full``, ``sqrt.approx``, ``rcp``,
  ``ex2``, ``lg2`` ...), subnormals taken for 0 (``.ftz``), another direction of rounding. No kernel needs one: exp and log are polynomials of our own
  (:mod:`.triton_math`), the same on both sides.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tio_megatron.contract import VocabOrder
from tio_megatron.kernels import families

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
BF16 = torch.bfloat16
LOOSE = re.compile(r"\b(?:add|sub|mul|mad)(?:\.ftz)?(?:\.sat)?\.(?:f32|f64|f16|bf16|f16x2|bf16x2|f32x2)\b")
INEXACT = re.compile(
    r"\b[a-z]\w*(?:\.\w+)*?\.(?:approx|full|ftz)\b|\b(?:add|sub|mul|mad|fma|div|sqrt|rcp)\.r[zmp]\b"
    r"|\bcvt\.(?:r[zmp]|rna|rs)(?:\.\w+)*?\.(?:f64|f32|tf32|f16|bf16|f16x2|bf16x2)\b"
)
COMMAND = "python -m tio_megatron.kernels.triton_report tests/golden/triton_sm90.txt"


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled for one launch."""

    name: str
    registers: int
    spilt: int
    shared: int
    warps: int
    instructions: tuple[str, ...]
    fused: int
    loose: int
    inexact: int
    atomics: int
    ptx: str

    def problems(self) -> list[str]:
        """Why the bytes would not be those of the definition; nothing when nothing speaks against it."""
        found = [f"{self.name}: {self.loose} sums or products without a rounding mode may be fused; compile with TWO_ROUNDINGS"] if self.loose else []
        if self.inexact:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(INEXACT.findall(self.ptx)).items()))
            found.append(f"{self.name}: {kinds}; tl.div_rn, tl.sqrt_rn and triton_math's exp and log are the operations of the contract")
        return found


def compile_launch(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
    """Compile ``fn[grid](*args, **kwargs)`` for :data:`TARGET`, with the specialisations that Triton derives from the arguments."""
    given = dict(zip(fn.arg_names, args, strict=False)) | {name: value for name, value in kwargs.items() if name in fn.arg_names}
    options = {name: value for name, value in kwargs.items() if name not in fn.arg_names}
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, parameter in enumerate(fn.params):
        value = given[parameter.name]
        fixed = not parameter.do_not_specialize
        if parameter.is_constexpr or (fixed and type(value) is int and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if fixed and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    made = triton.compile(ASTSource(fn, signature, constants, attributes), target=TARGET, options=options)
    ptx = made.asm["ptx"]
    registers, spilt = _resources(made.asm["cubin"])
    instructions = tuple(sorted(set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.(\S+?)\.f32\.bf16", ptx))))
    loose, inexact = len(LOOSE.findall(ptx)), len(INEXACT.findall(ptx))
    fused, atomics = len(re.findall(r"\bfma\.rn\.f32", ptx)), len(re.findall(r"\b(?:atom|red)\.", ptx))
    return Compiled(fn.__name__, registers, spilt, made.metadata.shared, made.metadata.num_warps, instructions, fused, loose, inexact, atomics, ptx)


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text!r}")
    return int(found[1]), int(found[2])


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Inside, a launch of a Triton kernel compiles it for :data:`TARGET` and runs nothing; the list grows by one each time."""
    found: list[Compiled] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(compile_launch(self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        yield found


def launches() -> dict[str, Callable[[], object]]:
    """What is compiled: an operator (and what of it) and a launch with tensors of Qwen3-30B-A3B's widths, whose values are never looked at."""
    from tio_megatron.kernels.adam import triton as adam
    from tio_megatron.kernels.attention import triton as attention
    from tio_megatron.kernels.attention import triton_backward
    from tio_megatron.kernels.combine import triton as combine
    from tio_megatron.kernels.embedding import triton as embedding
    from tio_megatron.kernels.grouped import triton as grouped
    from tio_megatron.kernels.integer_sum import triton as integer_sum
    from tio_megatron.kernels.linear import triton as linear
    from tio_megatron.kernels.logprob import triton as logprob
    from tio_megatron.kernels.math import triton as math
    from tio_megatron.kernels.norm import triton as norm
    from tio_megatron.kernels.rope import triton as rope
    from tio_megatron.kernels.router import triton as router
    from tio_megatron.kernels.squares import triton as squares
    from tio_megatron.kernels.swiglu import triton as swiglu

    tokens, hidden, heads, groups, size, experts, ffn, vocab = 256, 2048, 32, 4, 128, 128, 768, 151936

    def fp32(*shape: int) -> torch.Tensor:
        return torch.empty(*shape)

    def bf16(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=BF16)

    x, w, gate_up = bf16(tokens, hidden), bf16(hidden), bf16(tokens, 2 * ffn)
    q, kv, starts, lse = bf16(tokens, heads, size), bf16(tokens, groups, size), torch.tensor([0, 100, tokens], dtype=torch.int32), fp32(tokens, heads)
    cache, table, lengths = bf16(8, groups, 64, 2 * size), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    up, down = bf16(4, 2 * ffn, hidden), bf16(hidden, heads * size)
    offsets, ids = torch.tensor([0, 64, 128, 192, 256]), torch.zeros(tokens, 8, dtype=torch.int64)
    logits, score, row = fp32(tokens, experts), fp32(tokens, 8), fp32(tokens)
    words, order = fp32(4, vocab), VocabOrder(vocab)
    low, high, peak = torch.zeros(hidden, 2 * ffn, dtype=torch.int64), torch.zeros(hidden, 2 * ffn, dtype=torch.int64), fp32(1)
    shard = (vocab, order.runs, order.block, 0, order.padded)
    return {
        "matmul, 1 leaf": lambda: linear.matmul(x, bf16(5120, hidden), 1, False, BF16),
        "matmul, 4 leaves": lambda: linear.matmul(bf16(tokens, heads * size), down, 4, False, BF16),
        "matmul, 8 leaves": lambda: linear.matmul(bf16(tokens, heads * size), down, 8, False, BF16),
        "matmul, gradient of gate and up": lambda: linear.matmul(gate_up, up[0].t(), 8, True, BF16),
        "matmul, fp32 gradient": lambda: linear.matmul(logits, bf16(experts, hidden).t(), 1, False, BF16),
        "grouped": lambda: grouped.grouped(x, list(up), offsets, 1, False, BF16),
        "attention": lambda: attention.attention(q, kv, kv, starts, starts, 0.1),
        "attention_paged": lambda: attention.attention_paged(q, cache, table, lengths, starts, 0.1, q),
        "attention_backward": lambda: triton_backward.attention_backward(q, q, kv, kv, q, lse, starts, starts, 0.1),
        "write_pages": lambda: attention.write_pages(kv, kv, cache, torch.zeros(tokens, dtype=torch.int64)),
        "rms_norm": lambda: norm.rms_norm(x, w, 1e-6),
        "rms_norm of heads": lambda: norm.rms_norm(q, bf16(size), 1e-6),
        "add_rms_norm": lambda: norm.add_rms_norm(x, x, w, 1e-6),
        "rms_norm_backward": lambda: norm.rms_norm_backward(x, x, w, 1e-6),
        "swiglu": lambda: swiglu.swiglu(gate_up),
        "swiglu_backward": lambda: swiglu.swiglu_backward(bf16(tokens, ffn), gate_up),
        "silu": lambda: swiglu.silu(gate_up),
        "silu_backward": lambda: swiglu.silu_backward(gate_up, gate_up),
        "rope": lambda: rope.rope(q, torch.zeros(tokens, dtype=torch.int64), fp32(64, size), False),
        "router_scores": lambda: router.scores(logits),
        "route": lambda: router.route(logits, 8, True),
        "route_backward": lambda: router.route_backward(score, logits, ids, True),
        "combine": lambda: combine.combine(x, ids, ids, score, experts, [0], [experts]),
        "combine_backward": lambda: combine.combine_backward(x, x, ids, score),
        "vocab_max": lambda: logprob.vocab_max(words, vocab),
        "vocab_sumexp": lambda: logprob.vocab_sumexp(words, row, *shard, False),
        "vocab_sumexp, weighted": lambda: logprob.vocab_sumexp(words, row, *shard, True),
        "log_softmax": lambda: logprob.log_softmax(words, vocab, order.runs, order.block),
        "entropy": lambda: logprob.entropy(row, row),
        "entropy_backward": lambda: logprob.entropy_backward(row, words, row, row, row, vocab),
        "logprob_backward": lambda: logprob.logprob_backward(row, words, row, row, ids[:, 0], vocab),
        "gather_logprob": lambda: logprob.gather_logprob(row, row, row),
        "balance_sums": lambda: router.balance_sums(logits, ids, torch.zeros(tokens, dtype=torch.int64), 2),
        "balance_backward": lambda: router.balance_backward(logits, fp32(2, experts), ids[:, 0]),
        "embedding_backward": lambda: embedding.embedding_backward(x, ids[:, 0], 1024, 0),
        "add_products": lambda: integer_sum.add_products([low], [high], [peak], [-40], [40], x, gate_up, offsets, offsets[:2], None),
        "add_rows": lambda: integer_sum.add_rows(low, high, peak, -40, 40, gate_up, ids[:, 0]),
        "add_norm_terms": lambda: integer_sum.add_norm_terms(low[0], high[0], peak, -40, 40, gate_up, gate_up, 1e-6),
        "sum_value": lambda: integer_sum.sum_value(low, high, -40, 40, fp32(*low.shape)),
        "adam": lambda: adam.adam_(row, row, row, row, bf16(tokens), [0.5] * 8, True),
        "add_squares_": lambda: squares.add_squares_(torch.zeros(20, dtype=torch.int64), row),
        "exp": lambda: math.KERNELS["exp"](row),
        "log": lambda: math.KERNELS["log"](row),
        "tree_add": lambda: math.tree_add(fp32(8, tokens, hidden)),
    }


def table() -> tuple[str, list[str]]:
    """The report, one row per kernel and launch, each kernel once per set of compile-time sizes; and what speaks against its kernels."""
    problems: dict[str, None] = {}
    lines = [
        f"# {families.version('triton-sm90')} for sm_90: compiled, nothing has run. {COMMAND}",
        f"{'launch':<34} {'kernel':<16} {'warps':>5} {'registers':>9} {'spilt':>5} {'shared':>7} {'fused':>6} {'loose':>5} {'inexact':>7} {'atomic':>6}"
        "  instruction",
    ]
    for what, launch in launches().items():
        with compiling() as found:
            launch()
        seen = set()
        for one in found:
            problems |= dict.fromkeys(f"{what}: {problem}" for problem in one.problems())
            row = f"{what:<34} {one.name:<16} {one.warps:>5} {one.registers:>9} {one.spilt:>5} {one.shared:>7} {one.fused:>6} {one.loose:>5}"
            row = f"{row} {one.inexact:>7} {one.atomics:>6}  {' '.join(one.instructions)}".rstrip()
            if row not in seen:
                lines.append(row)
                seen.add(row)
    return "\n".join(lines) + "\n", list(problems)


if __name__ == "__main__":
    report, wrong = table()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(report)
    print(report, end="")
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    sys.exit(1 if wrong else 0)

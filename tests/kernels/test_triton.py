"""The Triton kernels without a GPU: interpreted in a process of their own (their tests are in ``tests/triton_kernels``), and compiled for sm_90."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tio_megatron import kernels
from tio_megatron.kernels import families

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "triton_sm90.txt"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: it has no build for this processor")


def interpreted(*which: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "tests/triton_kernels", *which]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)


@needs_triton
@pytest.mark.full
def test_interpreted():
    done = interpreted("-m", "not full")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 40 and "skipped" not in done.stdout


@needs_triton
@pytest.mark.full
@pytest.mark.timeout(2400)  # all of them in one process, which one clock of a busy machine cannot hold
def test_interpreted_at_more_sizes():
    done = interpreted("-m", "full")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
def test_compiled_for_sm90():
    """One matrix instruction at every number of leaves and rows, with experts or without; one machine code with pages or without; no contraction."""
    from tio_megatron.kernels import triton_report

    launches, found = triton_report.launches(), {}
    for what in ("matmul, 1 leaf", "matmul, 4 leaves", "grouped", "attention", "attention_paged", "exp", "tree_add", "rms_norm of heads"):
        with triton_report.compiling() as compiled:
            launches[what]()
        found[what] = compiled[0]
    for what, one in found.items():
        assert one.problems() == [] and one.atomics == 0 and one.spilt == 0, (what, one.problems(), one.atomics, one.spilt)
    products = [found[what].instructions for what in ("matmul, 1 leaf", "matmul, 4 leaves", "grouped")]
    assert products == [("m64n64k16",)] * 3, products
    assert found["attention"].ptx == found["attention_paged"].ptx
    assert found["exp"].fused == 13 * 1024 // 128 and found["tree_add"].fused == 0, "as many as the kernel asks for"


@needs_triton
@pytest.mark.parametrize("what", ["product", "product with fp32 rows", "grouped product", "attention"])
def test_one_machine_code_at_every_number_of_rows(what: str):
    """One decoded token is computed by the instructions, tiles and blocks that a prefill is computed by: the compiler's output is the same text."""
    import torch

    from tio_megatron.kernels import triton_report
    from tio_megatron.kernels.attention import triton as attention
    from tio_megatron.kernels.grouped import triton as grouped
    from tio_megatron.kernels.linear import triton as linear

    bf16 = torch.bfloat16
    weight, experts = torch.empty(512, 1024, dtype=bf16), list(torch.empty(4, 512, 1024, dtype=bf16))
    kv, starts = torch.empty(300, 4, 128, dtype=bf16), torch.tensor([0, 300], dtype=torch.int32)
    launches = {
        "product": lambda rows: linear.matmul(torch.empty(rows, 1024, dtype=bf16), weight, 4, False, bf16),
        "product with fp32 rows": lambda rows: linear.matmul(torch.empty(rows, 1024), weight, 1, False, bf16),
        "grouped product": lambda rows: grouped.grouped(
            torch.empty(rows, 1024, dtype=bf16), experts, torch.tensor([0, rows, rows, rows, rows]), 1, False, bf16
        ),
        "attention": lambda rows: attention.attention(torch.empty(rows, 32, 128, dtype=bf16), kv, kv, torch.tensor([0, rows], dtype=torch.int32), starts, 0.1),
    }
    codes = {}
    for rows in (1, 2, 16, 63, 64, 65, 300):
        with triton_report.compiling() as compiled:
            launches[what](rows)
        codes[rows] = [(one.name, one.instructions, one.ptx) for one in compiled]
    assert len(codes[1]) == 1 and "m64n64k16" in codes[1][0][1]
    assert all(code == codes[300] for code in codes.values()), {rows: [one[:2] for one in code] for rows, code in codes.items()}


STATED = {
    "_product": {"ROWS": 64, "COLUMNS": 128, "TERMS": 64},
    "_grains": {"TERMS": 64},
    "attention/_forward": {"ROWS": 64, "KEYS": 64, "LEVELS": 6},
    "_dq": {"ROWS": 64, "KEYS": 64},
    "_dkv": {"ROWS": 64, "KEYS": 64},
    "norm/_forward": {"CHAIN": 32},
    "_scores": {"CHAIN": 8},
    "_route": {"CHAIN": 8},
}
"""Blocks and chains of the order that family ``triton-sm90`` states, as numbers: a change of any is another family, or at least another version."""


@needs_triton
def test_every_launch_takes_the_blocks_that_the_family_states(monkeypatch: pytest.MonkeyPatch):
    from triton.runtime.jit import JITFunction

    from tio_megatron.contract import FAMILIES
    from tio_megatron.kernels import triton_report

    family, seen = FAMILIES["triton-sm90"], set()
    assert (family.order["k_block"], family.order["rows"], family.order["columns"], family.order["query_rows"]) == (64, 64, 128, 64)
    assert family.fields == {"kv_block": 64, "chain": 0, "row_chain": 32, "router_chain": 8}

    def run(self, *args, grid, warmup, **given):
        for name in (self.__name__, f"{self.fn.__module__.split('.')[-2]}/{self.__name__}"):
            if name in STATED:
                seen.add(name)
                assert {size: given[size] for size in STATED[name]} == STATED[name], (name, given)

    monkeypatch.setattr(JITFunction, "run", run)
    for launch in triton_report.launches().values():
        launch()
    assert seen == set(STATED)


@needs_triton
def test_the_check_of_contraction_can_fail():
    """Negative control: compiled as Triton would by itself, sums and products may be contracted."""
    from tio_megatron.kernels import triton_report
    from tio_megatron.kernels.math import triton as math

    with triton_report.compiling() as compiled:
        import torch

        x = torch.empty(1024)
        math._elementwise[(1,)](x, x, 1024, LOG=False, BLOCK=1024)
    assert compiled[0].loose > 0 or compiled[0].fused > 13 * 8
    if compiled[0].loose:
        assert "without a rounding mode may be fused; compile with TWO_ROUNDINGS" in compiled[0].problems()[0]


@needs_triton
@pytest.mark.full
def test_the_compilers_report_is_the_one_in_the_repository():
    from tio_megatron.kernels import triton_report

    known = GOLDEN.read_text()
    if families.version("triton-sm90") not in known:
        pytest.skip(f"{GOLDEN.name} is of the locked compiler, this is {families.version('triton-sm90')}; remake it with the lock: {triton_report.COMMAND}")
    assert triton_report.table() == (known, [])


@pytest.mark.full
def test_the_check_for_a_gpu_rehearses_on_the_cpu(tmp_path: Path):
    """Trainer TP 2 EP 2 in two processes and paged rollout: the script that waits for a GPU, with the CPU's kernels."""
    script = [sys.executable, "benchmarks/gpu_check.py"]
    rehearsal = [*script, "--rehearse", "--tokens", "12", "--steps", "layers", "--out", str(tmp_path)]
    done = subprocess.run(rehearsal, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("max |logdiff| 0\n") >= 2, done.stdout + done.stderr
    assert (tmp_path / "report.txt").read_text() == done.stdout
    assert subprocess.run(script, cwd=ROOT, capture_output=True, text=True).returncode == 2
    assert "nothing is none of layers, job" in subprocess.run([*script, "--steps", "nothing"], cwd=ROOT, capture_output=True, text=True).stderr


@pytest.mark.parametrize("given", [("--tokens", "0"), ("--tokens", "-3"), ("--limit", "0")])
def test_a_number_that_cannot_be_is_one_line_before_any_step(given: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from benchmarks import gpu_check

    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--rehearse", *given, "--out", str(tmp_path / "out")])
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == "" and re.fullmatch(rf"gpu_check: {given[0]} must be .* got {given[1]}.*\n", told.err), told
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_the_main_job_for_a_gpu_rehearses_on_the_cpu(tmp_path: Path):
    """megatron-core under the contract scores and trains in both layouts, the rollout kernels beside it; the stock control differs."""
    done = subprocess.run([sys.executable, "benchmarks/gpu_check.py", "--rehearse", "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if "round" in line]
    assert len(rows) == 4 and all(line.endswith("    0 differ   max |logdiff| 0") for line in rows), done.stdout
    assert "weights after 2 steps of Adam: 0 of 36 tensors differ" in done.stdout
    stock = next(line for line in done.stdout.splitlines() if line.startswith("stock"))
    assert float(stock.split()[-1]) > 0, stock


@needs_triton
def test_the_family_loads_where_there_is_no_gpu():
    """Registering needs Triton alone; the CPU's kernels stay the CPU's."""
    code = (
        "from tio_megatron import kernels; from tio_megatron.kernels import families; kernels.load('triton-sm90'); kernels.load('triton-sm90');"
        "print([name for name, there in families._table.items() if 'cuda' not in there], kernels.version('triton-sm90'))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("[] "), f"operators without a Triton kernel: {done.stdout}{done.stderr}"
    assert kernels.version("triton-sm90") in done.stdout and " " not in kernels.version("triton-sm90")


@needs_triton
@pytest.mark.parametrize("family", ["triton", "npu"])
def test_no_byte_of_another_family_changes_unseen(family: str) -> None:
    """``tests/golden/triton.txt`` and ``npu.txt``: the definitions, interpreted and by CPU twins. tests/golden/families.py says how to remake them."""
    code = f"from tests.golden import families as f; found, known = f.hashes({family!r}), f.read({family!r}); assert len(known) > 30; "
    code += "print(sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name)))"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[]", f"other bytes: {done.stdout}"

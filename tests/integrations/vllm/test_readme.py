"""The README's lines for vLLM run as they are printed, and print what the README says; with one rank the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.full)])
def test_the_lines_of_the_readme_print_what_it_says(tp: int, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (code, printed), *more = re.findall(r"^```python\n(from pathlib[^`]*import LLM[^`]*)```\n\n```\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    assert not more and code.count("tp=2, expert_parallel=True") == 1
    (tmp_path / "file.py").write_text(code.replace("tp=2, expert_parallel=True", f"tp={tp}, expert_parallel={tp > 1}"), encoding="utf-8")
    dropped = ("TIO_CONTRACT", "VLLM_ENABLE_V1_MULTIPROCESSING")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    variables |= {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "file.py"], capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=400)
    assert printed in done.stdout.splitlines(), done.stdout[-3000:] + done.stderr[-3000:]

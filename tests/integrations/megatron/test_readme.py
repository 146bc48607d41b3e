"""The README's model and the steps of docs/training.md run as they are printed, and print the same numbers on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SWITCH = "tio.apply(contract, vocab_size=1000)"


def first_block(page: str) -> str:
    """The first Python block of a page."""
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no Python block"
    return found[1]


def printed(folder: Path, code: str, ranks: int) -> list[str]:
    """What the code prints on that many ranks."""
    (folder / "file.py").write_text(code, encoding="utf-8")
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "TIO_CONTRACT")}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "file.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("micro-batch ")]
    assert len(lines) == 4, done.stdout
    return lines


@pytest.fixture(scope="module")
def code() -> str:
    both = first_block("README.md") + first_block("docs/training.md")
    assert both.count(SWITCH) == 1
    return both


@pytest.fixture(scope="module")
def alone(code, tmp_path_factory) -> list[str]:
    return printed(tmp_path_factory.mktemp("alone"), code, 1)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_same_numbers_on_any_number_of_ranks(code, alone, tmp_path, ranks):
    losses = [float(re.fullmatch(r"micro-batch \d: loss (\d\.\d{4}), gradient norm \d\.\d{8,}", line)[1]) for line in alone]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] + 0.1, "it does not learn"
    assert printed(tmp_path, code, ranks) == alone


@pytest.mark.full
def test_control_without_the_switch_they_differ(code, tmp_path):
    stock = code.replace(SWITCH, "pass")
    assert printed(tmp_path, stock, 1) != printed(tmp_path, stock, 2)

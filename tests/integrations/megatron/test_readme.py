"""The README's model, the steps and the checkpoint of docs/training.md run as they are printed, and print the same numbers on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tio_megatron.checkpoint import latest_training, training_state

ROOT = Path(__file__).resolve().parents[3]
SWITCH = "tio.apply(contract, vocab_size=1000)"


def block(page: str, number: int = 0) -> str:
    """A Python block of a page."""
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(found) > number, f"{page} has no such Python block"
    return found[number]


def printed(folder: Path, code: str, ranks: int) -> list[str]:
    """What the code prints on that many ranks."""
    (folder / "file.py").write_text(code, encoding="utf-8")
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "TIO_CONTRACT")}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "file.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("micro-batch ", "loss "))]
    assert [line.split()[0] for line in lines] == ["loss"] + 4 * ["micro-batch"], done.stdout
    if SWITCH in code:
        layout = f"{{'cp': 1, 'dp': 1, 'ep': 1, 'etp': {ranks}, 'pp': 1, 'tp': {ranks}}}"
        assert f"checkpoint: step 4, {{'next_sample': 8}}, written in {layout}" in done.stdout.splitlines()
        files = training_state(latest_training(folder / "out" / "run"))["files"]
        lines += [f"{name} {entry['sha256']}" for name, entry in files.items()]
    return lines


@pytest.fixture(scope="module")
def code() -> str:
    all_three = block("README.md") + block("docs/training.md") + block("docs/training.md", 1)
    assert all_three.count(SWITCH) == 1
    return all_three


@pytest.fixture(scope="module")
def alone(code, tmp_path_factory) -> list[str]:
    return printed(tmp_path_factory.mktemp("alone"), code, 1)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_same_numbers_on_any_number_of_ranks(code, alone, tmp_path, ranks):
    losses = [float(re.fullmatch(r"micro-batch \d: loss (\d\.\d{4}), gradient norm \d\.\d{8,}", line)[1]) for line in alone[1:5]]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] + 0.1, "it does not learn"
    assert printed(tmp_path, code, ranks) == alone


@pytest.mark.full
def test_control_without_the_switch_they_differ(tmp_path):
    stock = (block("README.md") + block("docs/training.md")).replace(SWITCH, "pass")
    assert printed(tmp_path, stock, 1) != printed(tmp_path, stock, 2)

"""The main job end to end, as a newcomer starts it: trainer TP 2 EP 2 against vLLM, three rounds, beside the stock packages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_quick(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "TIO_CONTRACT")}
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TIO_CACHE": str(tmp_path / "cache")}
    command = ["bash", str(ROOT / "launch" / "qwen3_moe.sh"), "--quick", "--tp", "2", "--ep", "2", "--pretrain-steps", "4", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    counted = re.fullmatch(r"logdiff 0 in (\d+) of (\d+) pairs \((\d+) tokens\); stock: max ([\d.e+-]+)", last)
    assert counted and counted[1] == counted[2] == "2" and int(counted[3]) > 5000, last

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [pair["trainer"] for pair in report["pairs"]] == ["TP 2 EP 2 ETP 1 SP", "TP 1"]
    for pair in report["pairs"]:
        assert (pair["nonzero"], pair["max_abs"], pair["rows_differing"]) == (0, 0.0, 0) and pair["rows"] == pair["tokens"] > pair["sampled"] > 500
    # The control: the same comparison by the stock packages must see differences, else zero would mean nothing.
    for pair in report["control"]:
        assert pair["nonzero"] > pair["tokens"] / 2 and pair["max_abs"] > 1e-4
    assert len(report["fingerprint"]) == 16 and report["versions"]["megatron-core"] and report["machine"]["cpu"]
    assert (tmp_path / "out" / "logdiff.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logdiff.png", "logs", "report.json"]

"""Models by specs for Transformer Engine, and its checkpoints: the cases of ``te_cases.py`` against a stand-in of it, in a process of their own."""

import subprocess
import sys

import te_cases

ROOT = te_cases.SUPPORT.parents[1]


def test_its_specs_and_parameter_names():
    """Names, shapes, checkpoints with extra states, losses, the gradients of fused norms over TP; what is not mapped; nothing of it is called."""
    path = {"PYTHONPATH": f"{ROOT}:{te_cases.SUPPORT}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-W", "ignore", te_cases.__file__], capture_output=True, text=True, env=path, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("done ")]
    assert lines == ["done checkpoints 0 False", "done checkpoints 8 False", "done checkpoints 8 True", "done gradients", "done refused"]

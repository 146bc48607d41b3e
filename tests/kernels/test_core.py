"""The C++ core stands alone: built without torch and without Python, on this processor and, where the tools are there, for Arm."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tio_megatron.kernels import build

CHECK = Path(__file__).parent / "core" / "product_check.cpp"
HASH = "4247f102f6c9c502"
"""Printed by the check on every processor. It changes only together with ``tio_version`` in csrc/isa.cpp (remake: run this test)."""


def test_without_torch_or_python(tmp_path):
    program = tmp_path / "check"
    subprocess.run(["g++", "-std=c++17", "-O1", "-ffp-contract=off", str(CHECK), str(build.LIBRARY), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(f"cases equal, hash {HASH}\n"), done.stdout


@pytest.mark.full
def test_on_arm(tmp_path):
    compiler, machine = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if not compiler or not machine:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user-static")
    program = tmp_path / "check"
    flags = [flag for flag in build.FLAGS if flag not in ("-fPIC", "-fvisibility=hidden")]
    sources = sorted(str(path) for path in build.SOURCES.glob("*.cpp"))
    subprocess.run([compiler, *flags, "-static", str(CHECK), *sources, "-o", str(program)], check=True)
    done = subprocess.run([machine, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(f"cases equal, hash {HASH}\n"), done.stdout

"""The C++ core stands alone: built without torch and without Python, on this processor and, where the tools are there, for Arm.

Ascend servers have Arm hosts. There, under emulation, *every* operator must give the bytes of tests/golden/kernels.txt.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loud import skip_loudly

from tests.golden import kernels as golden
from tio_megatron.kernels import build

CORE = Path(__file__).parent / "core"
CHECKOUT = CORE.parents[2]
HASH = "4247f102f6c9c502"
"""Printed by the check on every processor. It changes only together with ``tio_version`` in csrc/isa.cpp (remake: run this test)."""
FLAGS = [flag for flag in build.FLAGS if flag not in ("-fPIC", "-fvisibility=hidden")]


def functions() -> list[str]:
    """The names of all functions of the C interface that return a code."""
    return sorted(name for path in build.SOURCES.glob("*.cpp") for name in re.findall(r"TIO_API int (tio_\w+)\(", path.read_text()))


def table(folder: Path) -> Path:
    """A source file with the functions by name, for calls.cpp."""
    names = functions()
    declared = "".join(f'extern "C" void {name}();\n' for name in names)
    rows = "".join(f'  {{"{name}", {name}}},\n' for name in names)
    source = folder / "table.cpp"
    source.write_text(
        f"struct Entry {{ const char* name; void (*function)(); }};\n{declared}extern const Entry kTable[] = {{\n{rows}  {{nullptr, nullptr}}}};\n"
    )
    return source


def product(program: list[str]) -> None:
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(f"cases equal, hash {HASH}\n"), done.stdout


def goldens(program: list[str]) -> dict[str, str]:
    """Every operator's hash, by the kernels in ``program``."""
    command = [sys.executable, str(CHECKOUT / "tests" / "support" / "far_kernels.py"), *program]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    bound = {name for path in build.SOURCES.parent.glob("*/cpu.py") for name in re.findall(r"bind\(\s*\"(tio_\w+)\"", path.read_text())}
    assert re.match(rf"{len(bound)} functions, \d+ calls", done.stderr.splitlines()[-1]), f"not every function of {sorted(bound)} ran: {done.stderr}"
    return {name: value for value, name in (line.split("  ", 1) for line in done.stdout.splitlines())}


def test_without_torch_or_python(tmp_path):
    program = tmp_path / "check"
    subprocess.run(["g++", "-std=c++17", "-O1", "-ffp-contract=off", str(CORE / "product_check.cpp"), str(build.LIBRARY), "-o", str(program)], check=True)
    product([str(program)])


def test_the_far_kernels_are_asked(tmp_path):
    """The goldens by a program on this processor are the known ones; by a program in which one function does nothing they are not."""
    for name, planted in (("right", ""), ("wrong", 'extern "C" int nothing() { return 0; }\n')):
        source = table(tmp_path)
        if planted:
            source.write_text(planted + source.read_text().replace('{"tio_silu", tio_silu}', '{"tio_silu", reinterpret_cast<void (*)()>(nothing)}'))
        program = tmp_path / name
        subprocess.run(["g++", "-std=c++17", "-O1", str(CORE / "calls.cpp"), str(source), str(build.LIBRARY), "-o", str(program)], check=True)
        known, found = golden.read()[1], goldens([str(program)])
        assert found.keys() == known.keys()
        wrong = [operator for operator in known if found[operator] != known[operator]]
        assert all("silu" in operator for operator in wrong) and bool(wrong) == bool(planted), wrong


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """Programs for Arm by name, and how to run one."""
    compiler, machine = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not compiler or not machine:
        skip_loudly("the kernels on Arm need g++-aarch64-linux-gnu and qemu-user-static (apt-get install)")
    folder = tmp_path_factory.mktemp("arm")
    sources = [*sorted(build.SOURCES.glob("*.cpp")), CORE / "calls.cpp", CORE / "product_check.cpp", table(folder)]

    def compiled(source):
        subprocess.run([compiler, *FLAGS, "-c", str(source), "-o", str(folder / f"{source.stem}.o")], check=True)
        return folder / f"{source.stem}.o"

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = {source.stem: path for source, path in zip(sources, pool.map(compiled, sources), strict=True)}
    core = [str(path) for name, path in objects.items() if name not in ("calls", "product_check", "table")]
    for name, own in {"product_check": ["product_check"], "calls": ["calls", "table"]}.items():
        subprocess.run([compiler, "-static", "-fopenmp", *core, *(str(objects[one]) for one in own), "-o", str(folder / name)], check=True)
    return lambda name: [machine, str(folder / name)]


@pytest.mark.full
def test_the_product_on_arm(arm):
    product(arm("product_check"))


@pytest.mark.full
def test_every_operator_on_arm(arm):
    assert goldens(arm("calls")) == golden.read()[1]

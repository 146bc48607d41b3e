"""The Makefile's set-up: done once, done again after any interruption, and what is missing is said in one line.

Run on a copy of the checkout with a lock file of two small packages, from the wheels that this environment was made of.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WHEELS = Path(os.environ.get("TIO_WHEEL_CACHE") or Path.home() / ".cache" / "tio_megatron" / "wheels")
LOCK = "setuptools==78.1.1\nwheel==0.48.0\n"


def environment(cache: Path) -> dict[str, str]:
    """Without what an outer make handed down; pip is kept off the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PIP_", "PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "CI": "true", "TIO_WHEEL_CACHE": str(cache), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(WHEELS)}


@pytest.fixture
def make(checkout: Path):
    """make(target or variable, ...) in the copy -> the finished process."""
    (checkout / "two.lock").write_text(LOCK)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "LOCK=two.lock", f"PYTHON={sys._base_executable}", *arguments]
        return subprocess.run(command, cwd=checkout, env=environment(checkout / "wheels"), capture_output=True, text=True, timeout=300)

    return run


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line, without make's own `*** Error`."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    return lines[0]


cached = all(any(WHEELS.glob(line.strip().replace("==", "-") + "-*.whl")) for line in LOCK.splitlines())
needs_wheels = pytest.mark.skipif(not cached, reason=f"no wheels in {WHEELS}: this environment was not made by make")


@needs_wheels
def test_set_up_once_then_nothing_then_only_what_changed(make, checkout: Path) -> None:
    done = make("setup")
    assert done.returncode == 0, done.stderr
    python = checkout / ".venv" / "bin" / "python"
    where = subprocess.run([python, "-c", "import tio_megatron; print(tio_megatron.__file__)"], cwd="/", capture_output=True, text=True)
    assert where.stdout.strip() == str(checkout / "tio_megatron" / "__init__.py")
    assert (checkout / "tio_megatron" / "kernels" / "_tio_cpu.so").exists()

    assert (make("setup").stdout, make("setup").stderr) == ("make: Nothing to be done for 'setup'.\n", "")

    with (checkout / "setup.py").open("a") as file:
        file.write("# changed\n")
    again = make("setup")
    assert again.returncode == 0 and again.stderr == "make: building tio_megatron into .venv\n"

    # A run that was stopped leaves everything but the last stamp; another lock, or a moved checkout, has another stamp.
    for stamp in (checkout / ".venv" / ".tio").glob("env-*"):
        stamp.unlink()
    remade = make("setup")
    assert remade.returncode == 0 and "making .venv anew" in remade.stderr and "downloading" not in remade.stderr
    assert make("setup").stderr == ""


@needs_wheels
@pytest.mark.full
def test_stopped_at_any_moment_it_is_completed_by_the_next_run(make, checkout: Path) -> None:
    command = ["make", "LOCK=two.lock", f"PYTHON={sys._base_executable}", "setup"]
    for moment, how in ((0.2, signal.SIGINT), (1.0, signal.SIGKILL), (2.5, signal.SIGTERM), (4.0, signal.SIGKILL), (5.0, signal.SIGINT)):
        process = subprocess.Popen(command, cwd=checkout, env=environment(checkout / "wheels"), stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(moment)
        os.killpg(process.pid, how)
        process.wait(timeout=300)
    assert make("setup").returncode == 0
    assert make("setup").stderr == ""
    assert sorted(path.name for path in (checkout / "wheels").iterdir() if path.name.startswith(".new")) == []
    missing = "import importlib.metadata as m; print([str(f) for d in ('setuptools', 'wheel') for f in m.files(d) if not f.locate().exists()])"
    assert subprocess.run([checkout / ".venv" / "bin" / "python", "-c", missing], capture_output=True, text=True).stdout == "[]\n"


@needs_wheels
@pytest.mark.full
def test_two_at_once_do_the_work_once(checkout: Path, make) -> None:
    command = ["make", "LOCK=two.lock", f"PYTHON={sys._base_executable}", "setup"]
    both = [subprocess.Popen(command, cwd=checkout, env=environment(checkout / "wheels"), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(process.communicate(timeout=300)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0], said
    assert said.count("installing them into") == 1 and said.count("building tio_megatron") == 1


@needs_wheels
@pytest.mark.parametrize("held", ["Makefile", pytest.param("wheels", marks=pytest.mark.full)])
def test_a_wait_for_another_make_is_said(checkout: Path, make, held: str) -> None:
    """Somebody holds the lock of the cache, or of the checkout."""
    (checkout / "wheels").mkdir(exist_ok=True)
    lock = os.open(checkout / held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = ["make", "LOCK=two.lock", f"PYTHON={sys._base_executable}", "setup"]
    process = subprocess.Popen(command, cwd=checkout, env=environment(checkout / "wheels"), stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert line.startswith("make: waiting for another make") and process.poll() is None, line
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=300)
        os.close(lock)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["PYTHON=no-such-python"], "no 'no-such-python': install Python 3.11"),
        (["PYTHON=false"], "'false' is not a working Python 3.11"),
        (["CXX=no-such-compiler"], "no C++ compiler 'no-such-compiler': apt-get install g++"),
        (["GB_FREE=99999999"], "and 99999999 GB needed: make room"),
    ],
)
def test_what_is_missing_is_one_line_and_leaves_nothing(make, checkout: Path, arguments: list[str], says: str) -> None:
    assert says in complaint(make("setup", *arguments))
    assert not (checkout / ".venv").exists() and not (checkout / "wheels").exists()


def test_a_python_that_cannot_make_environments(make, checkout: Path, tmp_path: Path) -> None:
    """Debian's Python without its venv package."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\nexec "{sys._base_executable}" "$@"\n')
    python.chmod(0o755)
    assert complaint(make("setup", f"PYTHON={python}")).endswith("cannot make environments: apt-get install python3.11-venv")


def test_an_environment_of_somebody_elses_is_left_alone(make, checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").touch()
    assert "was not made by this Makefile" in complaint(make("setup"))
    assert make("distclean").returncode == 0
    assert (checkout / ".venv" / "precious").exists()


def test_help_names_every_target(make) -> None:
    listed = {line.split()[0] for line in make("help").stdout.splitlines()}
    assert {"demo", "test", "test-full", "bench", "clean", "setup"} <= listed

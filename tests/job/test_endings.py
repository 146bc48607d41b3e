"""How the job ends before its time, with real processes: one line on stderr, the right status, nothing left behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from tio_megatron.jobs import folders

ROOT = Path(__file__).resolve().parents[2]
JOB = str(ROOT / "launch" / "qwen3_moe.sh")
TWO_RANKS = ("--quick", "--tp", "2", "--ep", "2", "--pretrain-steps", "1", "--no-control", "--rounds", "1")
MARK = "QWEN3_MOE_TEST_MARK"


class Place:
    """A folder to start jobs in, and what they leave in it and among the processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        dropped = ("RANK", "WORLD_SIZE", "NPROC_PER_NODE", "TIO_CONTRACT", "OMP_NUM_THREADS")
        self.environment = {name: value for name, value in os.environ.items() if name not in dropped}
        self.environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TIO_CACHE": str(folder / "cache"), MARK: str(folder)}

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """The finished command."""
        return subprocess.run(command, cwd=self.folder, env=self.environment | more, capture_output=True, text=True, timeout=120)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """The command, running."""
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def processes(self) -> list[int]:
        """Everything started from here that still runs."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f"{MARK}={self.folder}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("qwen3_moe: ")]  # behind it torchrun may have words of its own
    assert line.startswith("qwen3_moe: error: ") and "Traceback" not in done.stderr, done.stderr
    return line


def can(*command: str) -> bool:
    """Whether this machine lets us; if not the skip is said loudly, as a warning in the summary too."""
    allowed = shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0
    if not allowed:
        warnings.warn(f"{' '.join(command)} is not allowed here: a test of the job's endings is SKIPPED", stacklevel=2)
    return allowed


def test_what_can_be_known_is_said_before_any_rank_starts(place):
    (place.folder / "p.jsonl").write_text('{"tokens": [5000]}\n')
    line = refused(place.run("bash", JOB, *TWO_RANKS, "--prompts", "p.jsonl"))
    assert "prompt 0 has token 5000, outside the vocabulary of 4096" in line
    assert os.listdir(place.folder) == ["p.jsonl"]


def test_what_only_a_rank_can_know_is_one_line_too(place):
    # A limit on the size of a file is met when the checkpoint is written, by rank 0, while rank 1 waits for it.
    done = place.run("bash", "-c", f'ulimit -f 1024; exec bash "{JOB}" {" ".join(TWO_RANKS)}')
    assert "cannot be written" in refused(done) and "File too large" in done.stderr
    assert not place.processes() and not list(place.folder.rglob("*.safetensors")) and not list(place.folder.rglob("*draft*"))


STARTS = {"launch": ("bash", "launch/qwen3_moe.sh", "rl"), "rank": (sys.executable, "-m", "examples.qwen3_moe.main")}
FAULTS = [("launch", "older"), ("rank", "missing"), *[pytest.param("rank", fault, marks=pytest.mark.full) for fault in ("older", "isa")]]


@pytest.mark.parametrize("start, fault", FAULTS)
def test_kernels_that_are_not_built_are_one_line(place, start, fault):
    """In a copy of the checkout, as after a ``git pull`` without ``make setup``."""
    for name in ("collectives", "examples", "launch", "tio_megatron"):
        shutil.copytree(ROOT / name, place.folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    library, source = place.folder / "tio_megatron/kernels/_tio_cpu.so", place.folder / "tio_megatron/kernels/csrc/adam.cpp"
    if fault == "older":
        source.write_text(source.read_text() + "// newer\n")
    if fault == "missing":
        library.unlink()
    said = {"older": "is older than its sources; run: make setup, or python -m tio_megatron.kernels.build"}
    said |= {"missing": "is not built; run: make setup, or python -m tio_megatron.kernels.build", "isa": "'sse9' is not available on this processor"}
    line = refused(place.run(*STARTS[start], PYTHONPATH=str(place.folder), **({"TIO_CPU_ISA": "sse9"} if fault == "isa" else {})))
    assert said[fault] in line
    assert not (place.folder / "out").exists() and not (place.folder / "cache").exists()


@pytest.mark.full
def test_under_a_torchrun_of_ones_own_it_is_said_once_and_the_status_is_torchruns(place):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (place.folder / "out").write_text("a file")
    done = place.run(*torchrun, JOB, *TWO_RANKS, "--out", "out")
    said = [line for line in done.stderr.splitlines() if line.startswith("qwen3_moe: ")]
    assert said == ["qwen3_moe: error: --out out: is a file, not a folder; name a folder, or a path where one can be made"], done.stderr
    assert done.returncode == 1 and os.listdir(place.folder) == ["out"]


def test_a_full_disk_is_said_first(place):
    if not can("unshare", "-m", "true"):
        pytest.skip("no mount namespaces: a really full disk was NOT tried")
    for name, fill, said in (("cache", "true", "set TIO_CACHE"), ("out", "head -c 2M /dev/zero > out/full", "--out out: ")):
        (place.folder / name).mkdir()
        mounted = f'mount -t tmpfs -o size=1m none {name} && {{ {fill} 2>/dev/null; exec bash "{JOB}" --quick --out out; }}'
        done = place.run("unshare", "-m", "sh", "-c", mounted)
        if done.stderr.startswith("mount:"):
            pytest.skip("mounting is not allowed: a really full disk was NOT tried")
        assert said in refused(done), done.stderr
        (place.folder / name).rmdir()


@pytest.mark.parametrize("how, said", [(signal.SIGINT, "interrupted"), pytest.param(signal.SIGTERM, "ended by SIGTERM", marks=pytest.mark.full)])
def test_a_signal_while_vllm_starts_ends_everything(place, how, said):
    process = place.start("bash", JOB, *TWO_RANKS)
    logs = place.folder / "out" / "qwen3_moe" / "logs"
    deadline = time.monotonic() + 120
    while not (logs.exists() and len(place.processes()) >= 4) and process.poll() is None and time.monotonic() < deadline:  # made for the engine's child
        time.sleep(0.1)
    running = place.processes()
    assert len(running) >= 4, "the starter, two ranks, an engine"
    process.send_signal(how)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + how and f"qwen3_moe: {said}" in errors.splitlines(), errors
    assert not place.processes()
    assert not [path for number in running for path in Path("/dev/shm").glob(f"tio-job-{number}-*")]
    assert [path.name for path in (place.folder / "out" / "qwen3_moe").iterdir()] == ["logs"]


def test_of_two_jobs_with_one_folder_the_second_is_refused(place):
    out = place.folder / "out"
    out.mkdir()
    (out / "report.json").write_text("of an earlier run")
    first = place.start("bash", JOB, "--out", "out", "--pretrain-steps", "100000", "--num-layers", "2", "--no-control")
    deadline = time.monotonic() + 120
    while not list(place.folder.glob("cache/tiny-random-*")) and first.poll() is None and time.monotonic() < deadline:  # made once the folder is its own
        time.sleep(0.1)
    assert first.poll() is None, first.communicate()
    for second in ([], ["rl", "--stock"]):
        assert "out: another job is writing there" in refused(place.run("bash", JOB, *second, "--out", "out"))
    assert first.poll() is None and [path.name for path in out.iterdir()] == ["report.json"] and (out / "report.json").read_text() == "of an earlier run"
    first.kill()  # nobody can tidy up after this one
    first.communicate(timeout=300)
    while place.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    with folders.claimed(out):
        assert (out / "report.json").read_text() == "of an earlier run"


@pytest.mark.full
def test_ctrl_c_before_the_ranks_are_up(place):
    process = place.start("bash", JOB, *TWO_RANKS)
    deadline = time.monotonic() + 60
    while len(place.processes()) < 3 and time.monotonic() < deadline:  # the ranks have just been started: they import
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "qwen3_moe: interrupted" in errors.splitlines(), errors
    assert not place.processes() and not (place.folder / "out").exists()


@pytest.mark.full
def test_ranks_end_with_a_starter_that_was_killed(place):
    process = place.start("bash", JOB, *TWO_RANKS)
    deadline = time.monotonic() + 120
    while not (place.folder / "cache").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    deadline = time.monotonic() + 60
    while place.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not place.processes()

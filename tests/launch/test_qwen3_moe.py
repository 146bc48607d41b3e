"""launch/qwen3_moe.sh is both shell and Python: every way of starting it reaches the job's main(argv), and its exit status comes back.

The job's options are the real ones; the job itself is a stand-in that writes down what reached it, so that only launching is tested.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = """
import json, multiprocessing, os, time

def child(queue):
    queue.put("child")

def main(argv):
    seen = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    if os.environ.get("SPAWN"):  # a spawned child reads the launch script again, under another name: it must not start a second job
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        seen["spawned"] = queue.get(timeout=60)
        process.join()
    with open(os.path.join(os.environ["SEEN"], f"rank{seen['RANK']}.json"), "x") as file:
        json.dump({"argv": argv, "cwd": os.getcwd(), **seen}, file)
    if os.environ.get("SLEEP"):
        time.sleep(60)
    deadline = time.monotonic() + 60  # torchrun ends the others when the first rank fails: all of them write first
    while len(os.listdir(os.environ["SEEN"])) < int(seen["WORLD_SIZE"] or 1) and time.monotonic() < deadline:
        time.sleep(0.02)
    return int(os.environ.get("EXIT", "0"))
"""


class Checkout:
    """A folder with the real launch script and the stand-in job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.script = str(root / "launch" / "qwen3_moe.sh")
        self.seen = root / "seen"
        self.away = root / "somewhere else"
        for folder in (self.away, self.seen, root / "launch"):
            folder.mkdir()
        shutil.copytree(ROOT / "examples" / "qwen3_moe", root / "examples" / "qwen3_moe")
        shutil.copy(ROOT / "launch" / "qwen3_moe.sh", self.script)
        (root / "examples" / "qwen3_moe" / "main.py").write_text(JOB)
        rl = root / "examples" / "qwen3_moe" / "rl.py"  # the real options stay
        rl.write_text(rl.read_text() + JOB.replace('"argv": argv', '"argv": ["in rl.py", *argv]'))

    def environment(self, extra: dict[str, str]) -> dict[str, str]:
        """The caller's, without what a launcher may have left in it."""
        dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "NPROC_PER_NODE", "PYTHON", "EXIT", "SPAWN", "SLEEP")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**environment, "SEEN": str(self.seen), **extra}

    def run(self, *command: str, **extra: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
        """The finished command, and what each rank saw, by rank."""
        done = subprocess.run(command, cwd=self.away, env=self.environment(extra), capture_output=True, text=True, timeout=120)
        files = sorted(self.seen.glob("rank*.json"))
        seen = [json.loads(file.read_text()) for file in files]
        for file in files:
            file.unlink()
        return done, seen


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_file_can_be_executed() -> None:
    assert os.access(ROOT / "launch" / "qwen3_moe.sh", os.X_OK)


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_help_starts_no_torchrun(checkout: Checkout, shell: str) -> None:
    done, seen = checkout.run(shell, checkout.script, "--help", PYTHON=sys.executable, NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: qwen3_moe.sh") and not seen


def test_options_that_cannot_work_start_no_torchrun(checkout: Checkout) -> None:
    done, seen = checkout.run("bash", checkout.script, "--tp", "many", PYTHON=sys.executable)
    assert done.returncode == 2 and not seen
    assert done.stderr == "qwen3_moe: error: --tensor-model-parallel-size/--tp: invalid int value: 'many' (--help lists the options)\n"
    for count, said in (("many", "NPROC_PER_NODE must be a whole number of at least 1, got 'many'"), ("3", "3 ranks do not divide by tp 2")):
        done, seen = checkout.run("bash", checkout.script, "--tp", "2", "--ep", "2", PYTHON=sys.executable, NPROC_PER_NODE=count)
        assert done.returncode == 2 and not seen and said in done.stderr


@pytest.mark.parametrize("option, said", [("--tp", "no cuts serve TP 3"), ("--ep", "16 experts do not"), ("--pp", "do not divide by pp 3")])
def test_a_layout_that_does_not_fit_is_one_line_and_starts_no_rank(checkout: Checkout, option: str, said: str) -> None:
    done, seen = checkout.run("bash", checkout.script, option, "3", PYTHON=sys.executable)
    assert done.returncode == 2 and not seen
    (line,) = done.stderr.splitlines()
    assert line.startswith("qwen3_moe: error: ") and said in line


def test_shell_starts_the_ranks_of_the_layout_and_hands_the_exit_status_on(checkout: Checkout) -> None:
    arguments = ["--tp", "2", "--expert-model-parallel-size=2", "--out", "a b"]
    done, seen = checkout.run("bash", checkout.script, *arguments, PYTHON=sys.executable, EXIT="2")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert [(rank["RANK"], rank["WORLD_SIZE"], rank["OMP_NUM_THREADS"]) for rank in seen] == [("0", "2", "1"), ("1", "2", "1")]
    assert all(rank["argv"] == arguments and rank["cwd"] == str(checkout.away) for rank in seen)


def test_the_word_rl_in_front_is_the_other_job(checkout: Checkout) -> None:
    done, seen = checkout.run("bash", checkout.script, "rl", "--steps", "2", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert [(rank["WORLD_SIZE"], rank["argv"]) for rank in seen] == [("2", ["in rl.py", "--steps", "2"])] * 2
    done, seen = checkout.run(sys.executable, "-m", "torch.distributed.run", "--standalone", checkout.script, "rl", "--stock")
    assert done.returncode == 0 and [rank["argv"] for rank in seen] == [["in rl.py", "--stock"]]
    done, seen = checkout.run("bash", checkout.script, "rl", "--steps", "0", PYTHON=sys.executable)
    assert (done.returncode, done.stderr, seen) == (2, "qwen3_moe: error: --steps must be at least 1, got 0\n", [])
    done, seen = checkout.run("bash", checkout.script, "rl", "--help", PYTHON=sys.executable)
    assert done.returncode == 0 and done.stdout.startswith("usage: qwen3_moe.sh rl") and "--stock" in done.stdout and not seen


def test_the_caller_may_choose_the_number_of_ranks(checkout: Checkout) -> None:
    done, seen = checkout.run("bash", checkout.script, "--quick", PYTHON=sys.executable, NPROC_PER_NODE="2", OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert [(rank["WORLD_SIZE"], rank["OMP_NUM_THREADS"]) for rank in seen] == [("2", "2"), ("2", "2")]


def test_shell_takes_the_checkouts_own_environment_by_a_link_too(checkout: Checkout) -> None:
    bin_folder = checkout.root / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (bin_folder / "python").chmod(0o755)
    (checkout.away / "link").symlink_to(checkout.script)
    done, seen = checkout.run("bash", "link", SPAWN="1")
    assert done.returncode == 0, done.stderr
    assert [(rank["WORLD_SIZE"], rank["OMP_NUM_THREADS"], rank["spawned"]) for rank in seen] == [("1", None, "child")]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_shell_script_stops_the_ranks(checkout: Checkout, how: signal.Signals) -> None:
    extra = {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "SLEEP": "1"}
    process = subprocess.Popen(["bash", checkout.script], cwd=checkout.away, env=checkout.environment(extra), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(checkout.seen.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(how)
    said = process.communicate(timeout=300)[1]  # ends only when the ranks have closed their end of the pipe
    assert process.returncode == 128 + how, said
    assert "Traceback" not in said


def test_torchrun_runs_the_file_with_python(checkout: Checkout) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done, seen = checkout.run(*torchrun, "--nproc-per-node", "2", checkout.script, "--tp", "2", "--ep", "2")
    assert done.returncode == 0, done.stderr
    assert [(rank["RANK"], rank["WORLD_SIZE"]) for rank in seen] == [("0", "2"), ("1", "2")]
    assert all(rank["argv"] == ["--tp", "2", "--ep", "2"] for rank in seen)


def test_a_bare_python_is_one_line(checkout: Checkout, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    done, seen = checkout.run("bash", checkout.script, PYTHON=str(tmp_path / "bare" / "bin" / "python"))
    assert done.returncode == 2 and not seen
    assert done.stderr.count("\n") == 1 and "bin/python has no " in done.stderr and "make setup" in done.stderr


FIRST_IMPORT_OF_TORCH = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("TORCH_CPP_LOG_LEVEL", os.environ.get("TORCH_CPP_LOG_LEVEL"), flush=True)
            os._exit(7)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("rank", [None, "0"])
@pytest.mark.parametrize("job", [[], ["rl"], ["consistency"]])
def test_torch_is_told_to_keep_its_frames_to_itself_before_it_is_imported(job: list[str], rank: str | None, tmp_path: Path) -> None:
    """It reads the variable once; later it would print tens of frames of C++ wherever a rank or a store is lost."""
    (tmp_path / "sitecustomize.py").write_text(FIRST_IMPORT_OF_TORCH)
    dropped = {"TORCH_CPP_LOG_LEVEL", "RANK", "WORLD_SIZE", "NNODES"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    environment |= {"RANK": rank, "WORLD_SIZE": "1"} if rank else {}
    done = subprocess.run(["bash", str(ROOT / "launch" / "qwen3_moe.sh"), *job], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7 and done.stdout.splitlines()[-1] == "TORCH_CPP_LOG_LEVEL FATAL", done


def test_the_first_line_says_what_comes_and_how_long_it_takes(tmp_path: Path) -> None:
    """Also when the output is a file, and before the imports of the engines."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "NNODES")}
    environment |= {"PYTHON": sys.executable, "TIO_CACHE": str(tmp_path / "cache")}
    began = time.monotonic()
    command = ["bash", str(ROOT / "launch" / "qwen3_moe.sh"), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        first, took = job.stdout.readline(), time.monotonic() - began
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
    assert took < 6, "two seconds are promised"
    assert first.startswith("qwen3_moe main: 1 rank, ") and "tiny is pre-trained first, about 3 minutes on two cores (once: it is kept in " in first

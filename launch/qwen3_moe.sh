#!/bin/sh
# The main job: train a Qwen3-MoE model with Megatron, sample it with vLLM, compare every log-probability. Three ways to start it:
#
#   bash launch/qwen3_moe.sh --quick                                       starts torchrun itself, as many ranks as the layout needs
#   torchrun launch/qwen3_moe.sh                                           one rank
#   torchrun --nproc-per-node 2 launch/qwen3_moe.sh --tp 2 --ep 2          the trainer's layout over two ranks
#   bash launch/qwen3_moe.sh --help                                        every option, with examples
#
# Over several hosts, on each: NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash launch/qwen3_moe.sh --tp 2 --ep 2
# (Slurm: launch/qwen3_moe.slurm; docs/environment.md has the variables.) MAX_RESTARTS=3: torchrun starts all ranks again when a rank has failed.
#
# And in the same ways the other jobs: reinforcement learning (bash launch/qwen3_moe.sh rl --help), and whether these hosts give the bytes of
# one process (bash launch/qwen3_moe.sh consistency --help).
#
# torchrun runs its file with Python, a person runs a .sh with a shell, so this file is both. To a shell, the next line is the command
# ":", which does nothing, and the shell is gone (exec) before it meets the Python below. To Python, it opens a string that nobody
# uses, and the program starts after the string's end.
''':'

here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-$here/../.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
exec "$python" "$here/qwen3_moe.sh" "$@"

'''

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOBS = {"": "main", "rl": "rl", "consistency": "consistency"}
"""First words that name a job, and its module; without such a word it is the main job."""
STORE_SECONDS = 5.0
"""That the first of several hosts keeps the store after its ranks have failed: there the ranks of the others ask who is missing."""


def start_torchrun(argv: list[str]) -> int:
    """torchrun in this process, which starts as many ranks here as the layout needs, or NPROC_PER_NODE. Bad input is refused before that.

    torchrun's static rendezvous meets in a store on the first host. The store is made here, so that it listens at MASTER_ADDR alone: torchrun, which would
    listen on every interface, takes part in one that is there.

    Returns:
        The exit status of the rank that failed first: torchrun's own would be 1 for everything.
    """
    import signal
    import socket
    import tempfile
    import time

    from examples.qwen3_moe import start
    from tio_megatron.jobs.problems import whole_number
    from tio_megatron.kernels.build import LibraryError

    job, words = split(argv)
    try:
        parse = import_module(f"examples.qwen3_moe.{'options' if job == 'main' else job}").parse
        hosts, host = whole_number("NNODES", 1, 1), whole_number("NODE_RANK", 0)
        whole_number("OMP_NUM_THREADS", 1, 1)  # before torch's library of threads reads it
        needed = parse(words).trainer.ranks
        if "NPROC_PER_NODE" not in os.environ and needed % hosts:
            raise ValueError(f"a layout of {needed} ranks does not divide by {hosts} hosts; set NPROC_PER_NODE, or choose another layout")
        count, restarts = whole_number("NPROC_PER_NODE", needed // hosts, 1), whole_number("MAX_RESTARTS", 0)
        options = parse(words, count * hosts)
        if hosts > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
            raise ValueError("MASTER_ADDR and MASTER_PORT must name the first host and a free port there, the same on all hosts")
        address, port = (os.environ["MASTER_ADDR"], whole_number("MASTER_PORT", 0)) if hosts > 1 else ("127.0.0.1", 0)
        if host == 0:
            total = count * hosts
            print(f"qwen3_moe {job}: {total} rank{'s' * (total > 1)}, checked and started within half a minute; {options.begins_with}", flush=True)
        if job == "consistency":  # reads and writes nothing
            start.check_versions()
            start.check_variables()
        else:
            start.check(getattr(options, "job", options), shared=hosts > 1)
        server = socket.create_server((address, port)) if host == 0 else None
    except (LibraryError, OSError, OverflowError, ValueError) as problem:
        return start.refuse(problem)
    if count > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if server is not None:
        port = server.getsockname()[1]
        store = TCPStore(address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=server.detach())
    meet = ["--nnodes", hosts, "--node-rank", host, "--master-addr", address, "--master-port", port]
    with tempfile.TemporaryDirectory(prefix="qwen3_moe-torchrun-") as log:
        ranks = ["--nproc-per-node", count, "--max-restarts", restarts, "--log-dir", log, __file__, *argv]
        try:
            torchrun([*map(str, meet), *map(str, ranks)])
        except ChildFailedError as failed:
            status = failed.get_first_failure()[1].exitcode
            if status not in (2, 130):  # of which rank 0 has said why
                print(failed, file=sys.stderr, flush=True)
            if hosts > 1 and server is not None:
                time.sleep(STORE_SECONDS)
            return status if status > 0 else 128 - status
        except SignalException as stopped:  # the ranks are ended by now
            print("qwen3_moe: interrupted" if stopped.sigval == signal.SIGINT else f"qwen3_moe: ended by {stopped.sigval.name}", file=sys.stderr)
            return 128 + stopped.sigval
    return 0


def split(argv: list[str]) -> tuple[str, list[str]]:
    """The job's module, and its options."""
    return (JOBS[argv[0]], argv[1:]) if argv[:1] and argv[0] in JOBS else ("main", argv)


def run_rank(argv: list[str]) -> int:
    """This rank's part of the job. An error that ends it goes into torch's error file, and torchrun shows it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    job, words = split(argv)
    status: int = record(import_module(f"examples.qwen3_moe.{job}").main)(words)
    return status


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # of the engines' processes
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # its errors are exceptions too, without the frames of its C++
    try:
        if "RANK" not in os.environ:
            sys.exit(start_torchrun(sys.argv[1:]))
        status = run_rank(sys.argv[1:])
    except KeyboardInterrupt:
        print("qwen3_moe: interrupted", file=sys.stderr)
        status = 130
    except ModuleNotFoundError as missing:
        if missing.name is None or "." in missing.name:  # a module of a package that is there: a mistake in the code, not a bare Python
            raise
        print(f"qwen3_moe: {sys.executable} has no {missing.name}: run `make setup` first, or name another Python with PYTHON=...", file=sys.stderr)
        status = 2
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    # The interpreter is not taken down: while it is, a process group's threads still run, and where one ends the C++ library may call it a crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

#!/bin/sh
# The main job: train a Qwen3-MoE model with Megatron, sample it with vLLM, compare every log-probability. Three ways to start it:
#
#   bash launch/qwen3_moe.sh --quick                                       starts torchrun itself, as many ranks as the layout needs
#   torchrun launch/qwen3_moe.sh                                           one rank
#   torchrun --nproc-per-node 2 launch/qwen3_moe.sh --tp 2 --ep 2          the trainer's layout over two ranks
#   bash launch/qwen3_moe.sh --help                                        every option, with examples
#
# Over several hosts, on each: NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash launch/qwen3_moe.sh --tp 2 --ep 2
# (Slurm: launch/qwen3_moe.slurm; docs/environment.md has the variables.) MAX_RESTARTS=3: torchrun starts all ranks again when one has failed.
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from examples.qwen3_moe.hosts import Hosts

ROOT = Path(__file__).resolve().parent.parent
JOBS = ("rl", "consistency")
"""First words that name a job; without one it is the main job."""


def start_torchrun(argv: list[str]) -> int:
    """The job over NPROC_PER_NODE processes of this host, or as many as the layout needs; alone on a free port, else together with the other hosts.

    What can be known to be wrong is said before any rank is started. Of ranks that fail, the first one's line and exit status are the job's;
    torchrun's own account of it is left out, and its status would be 1 for everything.
    """
    from examples.qwen3_moe import ending

    ending.listen(True)  # until torchrun does: imports take seconds

    from examples.qwen3_moe import hosts, places
    from tio_megatron.kernels.build import LibraryError

    job, words = split(argv)
    try:
        try:
            os.getcwd()
        except FileNotFoundError as gone:
            raise ValueError("the current folder has been removed: change into one that is there") from gone
        places.check_threads(os.environ)
        parse = import_module(f"examples.qwen3_moe.{job}_options" if job else "examples.qwen3_moe.options").parse
        options = parse(words)
        place = hosts.from_environment(os.environ)
        needed = options.trainer.ranks
        if "NPROC_PER_NODE" not in os.environ and needed % place.count:
            raise ValueError(f"layout {options.trainer} has {needed} ranks, which do not divide by {place.count} hosts; set NPROC_PER_NODE, or choose another layout")
        count = os.environ.get("NPROC_PER_NODE") or str(needed // place.count)
        if not (count.isascii() and count.isdecimal()) or int(count) < 1:
            raise ValueError(f"NPROC_PER_NODE must be the number of ranks to start, got {count!r}; unset it to start {needed // place.count}")
        options = parse(words, int(count) * place.count)

        from examples.qwen3_moe import early

        if job == "consistency":  # reads and writes nothing
            early.check_versions()
            early.check_variables()
            early.check_network()
        else:
            early.check(options.job if job else options, shared=place.many)
        place, server = place.listen()
        together = place.torchrun(f"qwen3_moe-{os.environ.get('SLURM_JOB_ID') or place.port}")
    except (LibraryError, OSError, ValueError) as problem:
        return ending.refuse(problem)
    if count != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    from examples.qwen3_moe import arrival

    return arrival.leave(run_torchrun(place, server, [*together, "--log-dir"], ["--nproc-per-node", count, str(ROOT / "launch" / "qwen3_moe.sh"), *argv]))


def run_torchrun(place: Hosts, server: socket.socket | None, together: list[str], ranks: list[str]) -> int:
    """torchrun in this process, with the other hosts; ``together``: its options up to ``--log-dir``, ``ranks``: those behind the folder.

    Returns:
        The job's exit status.
    """
    import logging
    import signal
    import tempfile
    import time
    from datetime import timedelta

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import main as torchrun

    from examples.qwen3_moe import arrival, ending, folders, starts, watch

    ending.leave_if_asked()
    logging.disable(logging.ERROR)
    starts.bind_torchruns_stores()
    starts.tell_ranks(place.address, place.port)
    too_many = arrival.limit_redundant_hosts()
    if place.many:
        starts.outlive_the_store(place.seconds if place.restarts else ending.STORE_SECONDS)
    folders.remove_left_behind(Path(tempfile.gettempdir()), "tio-torchrun-")  # of starts that were killed, not of those that run
    with tempfile.TemporaryDirectory(prefix="tio-torchrun-") as folder, folders.held(Path(folder)):
        if place.many and not place.restarts:
            ending.outlive_torchrun(Path(folder))
        began = time.monotonic()
        try:
            if server is not None:
                starts.keep(starts.store_at(place.address, server, timedelta(seconds=place.seconds)))
            if place.many:
                arrival.come(place)
                watch.watch(place, arrival.answers, Path(folder))
            torchrun([*together, folder, *ranks])
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            said = ending.said_below(Path(folder))
            status = failure.exitcode if said is None else said
            if status < 0:
                name = signal.Signals(-status).name
                status = ending.say(f"rank {rank} was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}", 128 - status)
            if place.many and starts.kept():
                time.sleep(max(0.0, ending.LAST_WORDS_SECONDS - ending.since_said_below(Path(folder))))  # ranks of other hosts ask the store of this one who is missing
            return status
        except SignalException as stopped:  # the ranks are ended by now
            if ending.said_below(Path(folder)) == 128 + stopped.sigval:
                return 128 + stopped.sigval
            return ending.say("interrupted" if stopped.sigval == signal.SIGINT else f"ended by {signal.Signals(stopped.sigval).name}", 128 + stopped.sigval)
        except arrival.Refused as problem:
            return ending.refuse(problem)
        except (RendezvousError, DistError) as problem:
            if too_many():
                return ending.say(f"error: {arrival.too_many(place)}", 2)
            with starts.asking():
                why, status = arrival.why(place, problem)
            limit = f"TIO_RENDEZVOUS_SECONDS={place.seconds}"
            waited = f"; waited {time.monotonic() - began:.0f} s for {place.count} hosts ({limit})" if place.many else ""
            if ending.started_below(Path(folder)):
                status = ending.say(f"error: torchrun cannot start the ranks again: {why}{f' ({limit})' if place.many else ''}", 1)
            else:
                ending.say(f"error: torchrun cannot bring the ranks together over {place.address}{waited}: {why}", status)
            if place.many and starts.kept():
                time.sleep(ending.LAST_WORDS_SECONDS)  # the other hosts ask here who is lost
            return status
    return 0


def run_job(argv: list[str]) -> int:
    """This process's part of the job."""
    job, words = split(argv)
    status: int = import_module(f"examples.qwen3_moe.{job or 'main'}").main(words)
    return status


def split(argv: list[str]) -> tuple[str, list[str]]:
    """The job's name, empty for the main one, and its options."""
    return (argv[0], argv[1:]) if argv[:1] and argv[0] in JOBS else ("", argv)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    for closed in (name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None):  # "bash ... >&-": else the next file takes its place
        setattr(sys, closed, open(os.devnull, "r" if closed == "stdin" else "w"))
    # Before anything can import torch. Its errors are exceptions too, without the frames of its C++; else it also says of hosts that it knows no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        if "RANK" not in os.environ:
            sys.exit(start_torchrun(sys.argv[1:]))
        status = run_job(sys.argv[1:])

        from examples.qwen3_moe.ending import leave

        leave(status)
    except KeyboardInterrupt:  # perhaps in the middle of an import
        from examples.qwen3_moe.ending import interrupted

        sys.exit(interrupted())
    except ModuleNotFoundError as missing:
        if missing.name is None or "." in missing.name:  # a module of a package that is there: a mistake in the code, not a bare Python
            raise
        print(f"qwen3_moe: {sys.executable} has no {missing.name}: run `make setup` first, or name another Python with PYTHON=...", file=sys.stderr)
        sys.exit(2)

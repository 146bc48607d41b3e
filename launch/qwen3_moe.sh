#!/bin/sh
# The main job: train a Qwen3-MoE model with Megatron, sample it with vLLM, compare every log-probability. Three ways to start it:
#
#   bash launch/qwen3_moe.sh --quick                                       starts torchrun itself, as many ranks as the layout needs
#   torchrun launch/qwen3_moe.sh                                           one rank
#   torchrun --nproc-per-node 2 launch/qwen3_moe.sh --tp 2 --ep 2          the trainer's layout over two ranks
#   bash launch/qwen3_moe.sh --help                                        every option, with examples
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

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def start_torchrun(argv: list[str]) -> int:
    """The job over NPROC_PER_NODE processes of this machine, or as many as the layout needs, on a free port.

    Returns the exit status of the rank that failed first; torchrun's own would be 1 for everything.
    """
    from examples.qwen3_moe.options import parse, refuse

    try:
        options = parse(argv)  # --help and unknown options end here
    except ValueError:
        return run_job(argv)  # the job says what is wrong with its options

    from examples.qwen3_moe.stages import refuse_misfits

    try:
        refuse_misfits(options)  # said once, before any rank is started to be told no
    except ValueError as problem:
        return refuse(problem)
    needed = options.trainer.ranks
    count = os.environ.get("NPROC_PER_NODE") or str(needed)
    if count != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", count, str(ROOT / "launch" / "qwen3_moe.sh"), *argv])
    except ChildFailedError as failed:
        status = failed.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    except SignalException as stopped:  # the ranks are ended by now
        return 128 + stopped.sigval
    return 0


def run_job(argv: list[str]) -> int:
    """This process's part of the job."""
    from examples.qwen3_moe.main import main

    return main(argv)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    try:
        sys.exit(run_job(sys.argv[1:]) if "RANK" in os.environ else start_torchrun(sys.argv[1:]))
    except ModuleNotFoundError as missing:
        if missing.name is None or "." in missing.name:  # a module of a package that is there: a mistake in the code, not a bare Python
            raise
        print(f"qwen3_moe: {sys.executable} has no {missing.name}: run `make setup` first, or name another Python with PYTHON=...", file=sys.stderr)
        sys.exit(2)

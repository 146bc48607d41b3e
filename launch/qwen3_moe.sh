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

import argparse
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ranks(argv: list[str]) -> int:
    """The fewest ranks that hold the trainer's layout. What is wrong with the options is for the job to say."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--tp", "--tensor-model-parallel-size", dest="tp", type=int, default=1)
    options.add_argument("--pp", "--pipeline-model-parallel-size", dest="pp", type=int, default=1)
    options.add_argument("--cp", "--context-parallel-size", dest="cp", type=int, default=1)
    options.add_argument("--ep", "--expert-model-parallel-size", dest="ep", type=int, default=1)
    options.add_argument("--etp", "--expert-tensor-parallel-size", dest="etp", type=int, default=1)
    try:
        layout, _ = options.parse_known_args(argv)
    except argparse.ArgumentError:
        return 1
    return max(1, layout.pp * math.lcm(layout.tp * layout.cp, layout.ep * layout.etp))


def start_torchrun(argv: list[str]) -> int:
    """The job over NPROC_PER_NODE or ``ranks(argv)`` processes of this machine, on a free port. Returns the first failed rank's exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    count = os.environ.get("NPROC_PER_NODE") or str(ranks(argv))
    if count != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torchrun(["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", count, str(ROOT / "launch" / "qwen3_moe.sh"), *argv])
    except ChildFailedError as failed:
        status = failed.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    return 0


def run_job(argv: list[str]) -> int | None:
    """This process's part of the job."""
    from examples.qwen3_moe.main import main

    return main(argv)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    started = "RANK" in os.environ or not {"-h", "--help"}.isdisjoint(sys.argv)
    try:
        sys.exit(run_job(sys.argv[1:]) if started else start_torchrun(sys.argv[1:]))
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "megatron", "vllm", "tio_megatron"):
            raise
        print(f"qwen3_moe: {sys.executable} has no {missing.name}: run `make setup` first, or name another Python with PYTHON=...", file=sys.stderr)
        sys.exit(2)

"""This process's place among the ranks, from the variables that torchrun sets; a shell may hold some of them from another day. Light to import."""

from __future__ import annotations

from collections.abc import Mapping

from examples.qwen3_moe.ending import InputProblem
from tio_megatron.contract.messages import shown

MOST_THREADS = 4096
"""Of a rank. No machine has more, and with many more the system refuses to start them."""
_LIMITS = {"RANK": (0, 1 << 20), "WORLD_SIZE": (1, 1 << 20), "LOCAL_RANK": (0, 1 << 20), "LOCAL_WORLD_SIZE": (1, 1 << 20), "MASTER_PORT": (0, 65535)}


def place(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and number of ranks; None where nothing has started ranks.

    Raises:
        InputProblem: a variable that is missing beside ``RANK``, or that is no such number.

    >>> place({}), place({"WORLD_SIZE": "many"}), place({"RANK": "1", "WORLD_SIZE": "2"})
    (None, None, (1, 2))
    """
    if "RANK" not in environ:
        return None
    without = "or unset RANK, and the launch script starts the ranks itself"
    if "WORLD_SIZE" not in environ:
        raise InputProblem(f"RANK={environ['RANK']} is set and WORLD_SIZE is not: torchrun sets both; {without}", everywhere=True)
    for name, (least, most) in _LIMITS.items():
        text = environ.get(name, "0" if least == 0 else "1")
        if not (text.isascii() and text.isdecimal() and len(text) < 9 and least <= int(text) <= most):
            raise InputProblem(f"{name} must be a whole number from {least} to {most}, got {text!r}; torchrun sets it, {without}", everywhere=True)
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if rank >= size:
        raise InputProblem(f"RANK {rank}: of WORLD_SIZE {size} ranks the last is {size - 1}; torchrun sets both, {without}", everywhere=True)
    return rank, size


def check_threads(environ: Mapping[str, str]) -> None:
    """Refuse ``OMP_NUM_THREADS`` that is no number of threads. To be called before torch is imported, whose library of threads
    would say so in words of its own.

    Raises:
        ValueError: names it.
    """
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads and not (threads.isascii() and threads.isdecimal() and len(threads) < 9 and 1 <= int(threads) <= MOST_THREADS):
        raise ValueError(f"OMP_NUM_THREADS must be a whole number of threads, from 1 to {MOST_THREADS}, got {shown(threads)}")

"""How the job ends before its time: one line, said once whatever the number of ranks, and the exit status that goes with it.

torchrun ends every rank as soon as one has left, so who has something to say says it before anybody can leave, and then lets itself not be
disturbed. Ranks of one start share torchrun's folder of that start; the first to put its line there is the one that prints it. Light to import:
this is used before torch is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

SAID = "said.json"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TORCHRUN_SECONDS = 4.0
"""That torchrun may take to end after its ranks."""
LAST_WORDS_SECONDS = 4.0
"""That a host with a store stays when its ranks have failed: a little longer than others take to find out why (`failure.py`, 3 seconds)."""
STORE_SECONDS = 10.0
"""After which a torchrun that starts its ranks only once takes a store that says nothing for lost."""
INTERRUPTED = 128 + signal.SIGINT
# What a person can mend about files and disks; anything else of an OSError is a mistake of the code.
_MENDABLE = {getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "ENOSPC", "EDQUOT", "EFBIG", "ENAMETOOLONG", "ELOOP", "EMFILE")}
_FULL = "No space left on device"


class InputProblem(ValueError):
    """Something the user can mend; the job ends with this one line and status 2. ``everywhere``: each rank knows its own part of it."""

    def __init__(self, *words: object, everywhere: bool = False) -> None:
        super().__init__(*words)
        self.everywhere = everywhere


def refuse(problem: BaseException) -> int:
    """Say in one line what is wrong with the input; returns the exit status for it."""
    return say(f"error: {describe(problem)}", 2, everywhere=isinstance(problem, InputProblem) and problem.everywhere)


def interrupted() -> int:
    """Say that Ctrl-C ended the job; returns the exit status for it."""
    return say("interrupted", INTERRUPTED)


def say(text: str, status: int, *, everywhere: bool = False) -> int:
    """Print one line, unless a rank of this start has said something already; from here on signals do not disturb this process.

    Ranks that no torchrun has started have no place to settle it: rank 0 says it, or with ``everywhere`` each of them.

    Returns:
        ``status``.
    """
    ignore_signals()
    line = f"qwen3_moe: {' '.join(text.split())}"
    if _first_to_say(line, status, everywhere):
        print(line, file=sys.stderr, flush=True)
    return status


def said_below(folder: Path) -> int | None:
    """The status that a rank of the last start has said in a folder given to torchrun as ``--log-dir``; None when nothing was said."""
    starts = started_below(folder)
    if not starts or not (starts[-1] / SAID).is_file():
        return None
    status: int = json.loads((starts[-1] / SAID).read_text())["status"]
    return status


def since_said_below(folder: Path) -> float:
    """Seconds since a rank of the last start has said something; 0 when none has."""
    starts = started_below(folder)
    try:
        return max(0.0, time.time() - (starts[-1] / SAID).stat().st_mtime) if starts else 0.0
    except FileNotFoundError:
        return 0.0


def started_below(folder: Path) -> list[Path]:
    """The folders of all starts in a folder given to torchrun as ``--log-dir``."""
    return sorted(folder.glob("*/attempt_*"), key=lambda start: int(start.name.removeprefix("attempt_")))


def outlive_torchrun(folder: Path) -> None:
    """From now on this process, in which torchrun runs, ends soon after its last rank if that has failed and said why, even if torchrun does not.

    On a host that is cut off torchrun waits for its store, which is on the first host, as long as it would wait for hosts at the start. Not for runs
    that are restarted: there torchrun may have no ranks for a while.
    """

    def watch() -> None:
        since = time.monotonic()
        while True:
            time.sleep(0.2)
            said = said_below(folder)
            if said is None or running_children():
                since = time.monotonic()
            elif time.monotonic() - since > TORCHRUN_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
                leave(said)

    threading.Thread(target=watch, daemon=True, name="outlive torchrun").start()


def running_children() -> list[int]:
    """The processes that this one has started and that have not ended."""
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # one of them has just ended
            for number in task.read_text().split():
                if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(number))
    return found


def describe(problem: BaseException) -> str:
    """What is wrong, for a person: files by their name, a full disk as such."""
    if disk_full(problem):
        where = f"{problem.filename}: " if isinstance(problem, OSError) and problem.filename else ""
        return f"{where}no space left on device; make room, or choose folders on larger disks with --out and TIO_CACHE ({problem})"
    if isinstance(problem, OSError) and problem.filename:
        return f"{problem.filename}: {problem.strerror or problem}"
    return str(problem)


def mendable(problem: BaseException) -> bool:
    """Whether the user can mend it: bad input, a folder that cannot be written, a full disk."""
    return isinstance(problem, InputProblem) or (isinstance(problem, OSError) and problem.errno in _MENDABLE) or disk_full(problem)


def disk_full(problem: BaseException) -> bool:
    """Whether a disk is full; some libraries say so in their own words only."""
    return (isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)) or _FULL in str(problem)


def leave(status: int) -> NoReturn:
    """End this process with ``status``, at once: what it had to say has been said, what it had to close is closed.

    The interpreter and the libraries are not taken down. While they are, a process group's threads can still run, and where one does
    the C++ library calls it a crash ("terminate called without an active exception"), in about one of six starts that end early.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def ignore_signals() -> None:
    """Let the way out not be disturbed: it is short, and whoever is in a hurry has SIGKILL."""
    with contextlib.suppress(ValueError):  # not the main thread: it has no say about signals
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


_asked: list[int] = []
"""A signal that :func:`_leave` has turned into an exception."""


def leave_if_asked() -> None:
    """Leave if a signal came and its exception went by: some packages' ``except:`` around an import of theirs takes Ctrl-C for a missing module.
    To be called after imports of engines, which take seconds.

    Raises:
        KeyboardInterrupt, SystemExit: as the signal did.
    """
    if _asked:
        _leave(_asked[0], None)


def listen(first: bool) -> None:
    """Signals end this rank: the first in order, with its children; the others, which own nothing, at once, even inside a collective."""
    for number in SIGNALS:
        signal.signal(number, _leave if first else signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    ignore_signals()
    _asked.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _first_to_say(line: str, status: int, everywhere: bool) -> bool:
    """Write the line into the folder of this start, whole or not at all; False when another rank was there before."""
    folder = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if not folder.name.startswith("attempt_"):
        return everywhere or int(os.environ.get("RANK", "0")) == 0
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".said-", encoding="utf-8") as draft:
            json.dump({"line": line, "status": status}, draft)
            draft.flush()
            os.link(draft.name, folder / SAID)
    except FileExistsError:
        return False
    except OSError:  # that disk is full, or the folder has gone: better said twice than not at all
        return True
    return True

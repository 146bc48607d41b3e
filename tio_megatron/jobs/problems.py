"""Errors that the user of a job can mend, in words for a person."""

from __future__ import annotations

import errno
import os

# What a person can mend about files and disks; anything else of an OSError is a mistake of the code.
_MENDABLE = {getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "ENOSPC", "EDQUOT", "EFBIG", "ENAMETOOLONG", "ELOOP", "EMFILE")}


class InputProblem(ValueError):
    """Something that the user can mend: the job ends with this one line and status 2."""


def describe(problem: BaseException) -> str:
    """What is wrong, in one line for a person: files by their name, a full disk as such."""
    text = " ".join(str(problem).split())
    if _disk_full(problem):
        where = f"{problem.filename}: " if isinstance(problem, OSError) and problem.filename else ""
        return f"{where}no space left on device; make room, or choose folders on larger disks ({text})"
    if isinstance(problem, OSError) and problem.filename:
        return f"{problem.filename}: {problem.strerror or text}"
    return text


def mendable(problem: BaseException) -> bool:
    """Whether the user can mend it: bad input, a folder that cannot be written, a full disk."""
    return isinstance(problem, InputProblem) or (isinstance(problem, OSError) and problem.errno in _MENDABLE) or _disk_full(problem)


def whole_number(name: str, default: int, least: int = 0) -> int:
    """The number in the environment variable ``name``; ``default`` where it is unset or empty.

    Raises:
        InputProblem: the variable holds something else.
    """
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise InputProblem(f"{name} must be a whole number of at least {least}, got {text[:60]!r}")
    return int(text)


def _disk_full(problem: BaseException) -> bool:
    """Some libraries say it in their own words only."""
    return (isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)) or "No space left on device" in str(problem)

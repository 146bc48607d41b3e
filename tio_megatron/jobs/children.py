"""Child processes that answer one JSON line with one JSON line: an engine, or further trainer layouts, beside the ranks of a job."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from tio_megatron.jobs.problems import InputProblem

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
)
_PREFIXES = ("TORCHELASTIC_", "PET_")


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what torchrun has put in it: for a process that is no rank."""
    return {key: value for key, value in environ.items() if key not in RANK_VARIABLES and not key.startswith(_PREFIXES)}


class ChildFailed(RuntimeError):
    """A child ended or reported an error that is not the user's."""


class Child:
    """One process in a session of its own, so that whatever it starts ends with it.

    Args:
        name: for messages and the log file.
        module: Python module to run (``python -m``).
        log: folder for what the child and its own children print.
        environment: variables added to (or, with None, taken from) this process's own; torchrun's are always taken out.
    """

    def __init__(self, name: str, module: str, log: Path, environment: Mapping[str, str | None] | None = None) -> None:
        self.name = name
        log.mkdir(parents=True, exist_ok=True)
        self.log = log / f"{name.replace(' ', '_')}.log"
        variables = without_ranks(os.environ)
        for key, value in (environment or {}).items():
            variables.pop(key, None)
            if value is not None:
                variables[key] = value
        with open(self.log, "wb") as file:
            command = [sys.executable, "-W", "ignore", "-m", module]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file, env=variables, start_new_session=True)

    def ask(self, action: str, progress: Callable[[dict[str, Any]], None] = lambda note: None, **fields: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; lines with ``progress`` on the way go to ``progress``.

        Raises:
            InputProblem: the child says that the input is bad.
            ChildFailed: any other error, or the child ended; names its log.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": action, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._ended(action)
        while line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if "progress" in answer:
                progress(answer)
            elif "input_problem" in answer:
                raise InputProblem(answer["input_problem"])
            elif "error" in answer:
                raise ChildFailed(f"{self.name}: {answer['error']} (log: {self.log})")
            else:
                return answer
        return self._ended(action)

    def _ended(self, action: str) -> Any:
        status = self._process.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        raise ChildFailed(f"{self.name} ended with status {status} during {action!r}: {lines[-1] if lines else 'it printed nothing'} (log: {self.log})")

    def close(self, patience: float = 15.0) -> None:
        """End the child and everything in its session. Harmless when it has ended."""
        process = self._process
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.close()  # end of input asks it to leave
        for sign, seconds in ((None, patience), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            if sign is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that outlived it
        assert process.stdout is not None
        process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(15.0 if kind is None else 0.5)


def serve(actions: Mapping[str, Callable[..., dict[str, Any]]], finish: Callable[[], None] = lambda: None) -> NoReturn:
    """The child's side: answer commands from standard input until it ends, then ``finish`` and leave at once.

    Everything printed meanwhile goes to standard error. Interpreter and libraries are not taken down: with torch and vLLM that takes seconds.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it then closes this child
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    global _answers
    _answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        fields = json.loads(line)
        action = fields.pop("do")
        try:
            answer = actions[action](**fields)
        except InputProblem as problem:
            answer = {"input_problem": str(problem)}
        except Exception as error:  # the boundary of the process: the parent decides what to do with it
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        _say(answer)
    try:
        finish()
    finally:
        sys.stderr.flush()
        os._exit(0)


def report(done: int, total: int, what: str = "") -> None:
    """Tell the parent how far a command has come; also from processes that the child forked."""
    if _answers is not None:
        _say({"progress": done, "total": total, "what": what})


_answers: int | None = None


def _say(answer: Mapping[str, Any]) -> None:
    assert _answers is not None
    os.write(_answers, json.dumps(answer).encode() + b"\n")


def end_with_parent(parent: int | None = None) -> None:
    """Ask Linux to end this process when its parent ends, however the parent ends. ``parent``: who that is, if it may have ended already."""
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(1)

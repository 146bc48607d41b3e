"""Two or more engines timed by turns, each in a process of its own with its model in memory, so that noise hits all alike."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent


class Engine:
    """A child process that answers one JSON line per request line; its standard error goes to a log that is shown when it dies.

    The child calls :func:`serve` with its request handler once its model is ready.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], log_folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log_folder / f"{name.replace(' ', '_')}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **(env or {})}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT
            )

    def ask(self, request: object = None) -> dict:
        """One answer.

        Raises:
            RuntimeError: the child ended; shows the end of its log.
        """
        assert self.process.stdin and self.process.stdout
        if request is not None:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}:\n" + "\n".join(self.log.read_text().splitlines()[-15:]))
        return json.loads(line)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(handler, ready: Mapping[str, object]) -> None:
    """The child's side: announce readiness, then answer each request with ``handler(request)`` until the parent closes the pipe.

    Whatever else the process prints goes to standard error, so that answers stay whole lines.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(dict(ready)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(handler(json.loads(line))), file=answers, flush=True)


def medians(engines: Mapping[str, Engine], request: object, repeats: int) -> dict[str, float]:
    """Median ``seconds`` of each engine's answers over ``repeats`` rounds by turns, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(repeats + 1):
        for name, engine in engines.items():
            answer = engine.ask(request)
            if turn:
                seconds[name].append(answer["seconds"])
    return {name: statistics.median(values) for name, values in seconds.items()}

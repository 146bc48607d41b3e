"""What a launch script starts, recorded by running it: stand-ins for programs that start engines come first in ``PATH``, note how they were called, and end.

All other lines of the script do run. A program that is called by its full path is no stand-in, and what a script asks of ``python`` comes back empty.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tio_megatron.findings.messages import cut
from tio_megatron.verify.doctor.settings import TRAINER_NAMES, VERL_OVERRIDE, of_words

PROGRAMS = ("python", "python3", "torchrun", "deepspeed", "vllm", "ray")
WARNING = f"every line of the script runs, but for {', '.join(PROGRAMS)} called by name, which are recorded in their place"
_STAND_IN = """#!{python} -IS
import json, os, sys, time
with open(os.path.join({folder!r}, f"{{time.time_ns()}}-{{os.getpid()}}.json"), "w") as file:
    json.dump({{"words": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "environment": dict(os.environ)}}, file)
"""


@dataclass(frozen=True)
class Started:
    """A program that a script called: its name and arguments, and its environment."""

    words: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def sides(self) -> Iterator[str]:
        """``trainer``, ``rollout``, both (verl) or none."""
        if any(VERL_OVERRIDE.fullmatch(word) and word.lstrip("+").startswith("actor_rollout_ref") for word in self.words):
            yield from ("trainer", "rollout")
        elif any(re.fullmatch(r"(.*/)?vllm(\.[\w.]+)?", word) for word in self.words):
            yield "rollout"
        elif {*TRAINER_NAMES.values(), "num_layers"} & of_words(self.words, "trainer", "the recorded command")[0].keys():
            yield "trainer"


def record(command: Sequence[str]) -> tuple[list[Started], int]:
    """Run ``command`` with the stand-ins; what it started, in order, and its exit status. Its output goes to standard error.

    Raises:
        ValueError: there is no such command.
    """
    with tempfile.TemporaryDirectory(prefix="tio-doctor-") as folder:
        programs, notes = Path(folder) / "bin", Path(folder) / "notes"
        programs.mkdir()
        notes.mkdir()
        for name in PROGRAMS:
            (programs / name).write_text(_STAND_IN.format(python=sys.executable, folder=str(notes)), encoding="utf-8")
            (programs / name).chmod(0o700)
        environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        try:
            done = subprocess.run(list(command), env=environment, stdout=sys.stderr.fileno(), check=False)
        except OSError as error:
            raise ValueError(f"{cut(shlex.join(command))}: cannot be run ({error})") from error
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(notes.iterdir())]
    return [Started(tuple(one["words"]), one["environment"]) for one in found], done.returncode


def of_side(started: Sequence[Started], side: str) -> Started | None:
    """The command of one side; None where none was started.

    Raises:
        ValueError: two commands that differ.
    """
    found = {one.words: one for one in started if side in one.sides}
    if len(found) > 1:
        each = "; ".join(cut(shlex.join(words), 120) for words in found)
        raise ValueError(f"{len(found)} commands of a {side} were started: {each}; --{side} with the one that is meant")
    return next(iter(found.values()), None)

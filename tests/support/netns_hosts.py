"""Hosts on one machine: Linux network namespaces, each with an address of its own, joined by veth pairs and a bridge. Needs root and iproute2.

Nothing of the machine's own network is touched: the bridge lives in a namespace too. A host sees no interface but ``lo`` and ``eth0``, has a name and
processes of its own, and cannot look at those of others; files are shared, as on a cluster with one file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bad_switch import Faults

_NUMBERS = itertools.count()
_INIT = """hostname "$0"
"$@"
status=$?
for process in /proc/[0-9]*; do
    words=$(tr '\\0' ' ' < "$process/cmdline" 2> /dev/null)
    [ "$process" = /proc/1 ] || [ -z "$words" ] || { echo "$0: left behind: $words" >&2; status=99; }
done
exit $status"""
"""The first process of a host, in sh. With it the system would end whatever the job has left behind, so it looks before: status 99."""


def missing() -> str | None:
    """Why hosts cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "not root: network namespaces cannot be made"
    if shutil.which("ip") is None:
        return "no `ip` command: apt-get install iproute2"
    if shutil.which("unshare") is None:
        return "no `unshare` command: apt-get install util-linux"
    name = f"tio-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here ({made.stderr.strip()})"
    inside = subprocess.run(["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount-proc", "--uts", "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"namespaces of processes are not allowed here ({inside.stderr.strip()})" if inside.returncode else None


@dataclass
class Host:
    """One host: start processes in it with :meth:`start`."""

    name: str
    address: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
        """A process of this host, in a session and among processes of its own. It ends with status 99 where it leaves a process behind."""
        init = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "sh", "-c", _INIT, self.name.rpartition("-")[2]]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *init, *command], env=dict(environment), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def processes(self) -> list[int]:
        """Everything that runs on it."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(number) for number in listed.stdout.split()]

    def link(self, up: bool) -> None:
        """Plug its cable in, or out."""
        _ip("-n", self.name, "link", "set", "eth0", "up" if up else "down")


@functools.cache
def netem() -> bool:
    """Whether this kernel makes faults itself (``tc netem``): tried on a namespace's own ``lo``."""
    if shutil.which("tc") is None:
        return False
    name = f"tio-{os.getpid()}-netem"
    _ip("netns", "add", name)
    try:
        words = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(words, capture_output=True).returncode == 0
    finally:
        _ip("netns", "del", name)


def who_makes_faults() -> str:
    """In words, for the output of a test."""
    return "the kernel's tc netem" if netem() else "our switch in user space (this kernel has no netem)"


@contextlib.contextmanager
def hosts(count: int, faults: Faults | None = None) -> Iterator[list[Host]]:
    """``count`` hosts that reach each other and nothing else; everything on them is ended with them. ``faults``: over a network that has them."""
    prefix = f"tio-{os.getpid()}-{next(_NUMBERS)}"
    switch, made = f"{prefix}-switch", []
    bad: subprocess.Popen[str] | None = None
    try:
        _ip("netns", "add", switch)
        for number in range(count):
            host = Host(f"{prefix}-h{number}", f"10.77.0.{number + 1}")
            _ip("netns", "add", host.name)
            made.append(host)
        if faults is None or netem():
            _bridge(switch, made)
        else:
            bad = _bad_switch(made, faults)
        for host in made:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            if faults is not None and bad is None:
                _ip("netns", "exec", host.name, "tc", "qdisc", "add", "dev", "eth0", "root", *netem_words(faults))
        yield made
    finally:
        for host in made:
            _end(host)
        if bad is not None:
            bad.communicate(timeout=10)  # it ends with its standard input
        for name in (*(host.name for host in made), switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _bridge(switch: str, made: Sequence[Host]) -> None:
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for number, host in enumerate(made):
        _ip("-n", host.name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", switch)
        _ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")


def netem_words(faults: Faults) -> list[str]:
    """The same faults in the words of ``tc``; netem jitters to both sides of its delay, our switch behind it. A reordered frame goes at once.

    >>> " ".join(netem_words(Faults(delay=0.002, jitter=0.002, loss=0.005, reorder=0.05)))
    'netem delay 3.000ms 1.000ms loss 0.50% reorder 5.00%'
    """
    middle, half = 1000 * (faults.delay + faults.jitter / 2), 500 * faults.jitter
    return ["netem", "delay", f"{middle:.3f}ms", f"{half:.3f}ms", "loss", f"{100 * faults.loss:.2f}%", "reorder", f"{100 * faults.reorder:.2f}%"]


def _bad_switch(made: Sequence[Host], faults: Faults) -> subprocess.Popen[str]:
    taps = [(f"tio{os.getpid() % 100000}t{number}", host.name) for number, host in enumerate(made)]
    settings = json.dumps({"taps": taps, "faults": dataclasses.asdict(faults)})
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("bad_switch.py")), settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        process.kill()
        process.communicate()
        raise RuntimeError("the switch could not make its interfaces")
    return process


def _end(host: Host) -> None:
    deadline = time.monotonic() + 10
    while (left := host.processes()) and time.monotonic() < deadline:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)
    for process in host.started:
        process.wait(10)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

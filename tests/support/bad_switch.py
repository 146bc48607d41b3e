"""A switch between hosts that delays, jitters, loses and reorders Ethernet frames: what `tc netem` does, also where the kernel was built without it.

Run as a process of its own: ``python bad_switch.py '{"taps": [...], ...}'`` prints ``ready`` once the interfaces are there, and ends with its
standard input. What happens to a frame is drawn from a seeded generator.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


@dataclass(frozen=True)
class Faults:
    """``delay`` and ``jitter`` in seconds; ``loss`` and ``reorder`` are shares of frames (a reordered one overtakes those on their way)."""

    delay: float = 0.002
    jitter: float = 0.002
    loss: float = 0.005
    reorder: float = 0.05
    seed: int = 1


def main(settings: dict) -> None:
    """Make a TAP per host, hand each to its namespace as ``eth0``, and forward."""
    faults = Faults(**settings["faults"])
    draw = random.Random(faults.seed)
    ports = []
    for name, host in settings["taps"]:
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        subprocess.run(["ip", "link", "set", name, "netns", host, "name", "eth0"], check=True)
        ports.append(port)
    print("ready", flush=True)
    known: dict[bytes, int] = {}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([*ports, 0], [], [], patience)
        if 0 in readable and not os.read(0, 4096):
            return
        for port in readable:
            while port and (frame := _read(port)):
                known[frame[6:12]] = port
                if draw.random() < faults.loss:
                    continue
                wait = 0.0 if draw.random() < faults.reorder else faults.delay + draw.random() * faults.jitter
                to = known.get(frame[:6])
                for other in [to] if to is not None else [one for one in ports if one != port]:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + wait, count, other, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(waiting)
            try:
                os.write(port, frame)
            except OSError:  # full, or unplugged: a switch drops it
                continue


def _read(port: int) -> bytes:
    try:
        return os.read(port, 65536)
    except OSError:  # nothing more, or unplugged
        return b""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

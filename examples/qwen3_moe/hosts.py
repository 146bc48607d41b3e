"""The hosts of a job, from the variables that people set for torchrun or that Slurm sets, and the network interface that reaches the first of them.

Light to import: this is used before torch is.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tio_megatron.contract.messages import shown

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""
SLURM_PORTS = range(20000, 30000)
"""Where a Slurm job's port lies when MASTER_PORT is not set: chosen by the job's number, the same on all its hosts."""


@dataclass(frozen=True)
class Hosts:
    """``count`` hosts, of which this is number ``rank``; ranks meet at ``address``:``port``, which is on the first, within ``seconds``.

    ``restarts``: how often torchrun starts all ranks again when one has failed. ``address_by``, ``port_by``, ``rank_by``: the variables that a person
    looks at when address, port or number are wrong.
    """

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    seconds: int = 600
    restarts: int = 0
    address_by: str = field(default="MASTER_ADDR", repr=False)
    port_by: str = field(default="MASTER_PORT", repr=False)
    rank_by: str = field(default="NODE_RANK", repr=False)

    def listen(self) -> tuple[Hosts, socket.socket | None]:
        """On the first host a port for torchrun's store, which would else listen on every interface; a free one where none is named.

        Returns:
            The hosts with the port, and the listening socket: on the interface that leads to ``address``, and nowhere else. None on other hosts.

        Raises:
            ValueError: the port is in use, or ``address`` is not this host's, or one that other hosts cannot reach.
        """
        if self.rank:
            return self, None
        own = own_address(self.address, self.port, self.address_by)
        if self.many and ipaddress.ip_address(own).is_loopback and not _is_loopback(self.address):
            raise ValueError(
                f"{self.address_by} {self.address}: on this host that is {own}, where other hosts cannot reach it (/etc/hosts?); {self._name('its address')}"
            )
        if own.partition("%")[0] not in _addresses(self.address):
            raise ValueError(
                f"{self.address_by} {self.address}: no address of this host, which is the first (its own on the way there is {own}); "
                f"give NODE_RANK 0 to the host that has it, or {self._name('another')}"
            )
        try:
            server = socket.create_server((own, self.port), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
        except OSError as error:
            raise ValueError(
                f"{self.port_by} {self.port}: cannot be listened on at {own} ({os.strerror(error.errno or 0)}); name a port that is free there"
                + ("" if self.port_by == "MASTER_PORT" else " (MASTER_PORT)")
            ) from error
        return replace(self, port=int(server.getsockname()[1])), server

    def _name(self, what: str) -> str:
        """What to do, with the variable to do it by where that is not the one that the message begins with."""
        return f"name {what}{'' if self.address_by == 'MASTER_ADDR' else ' by MASTER_ADDR'}"

    @property
    def many(self) -> bool:
        """Whether there is more than one."""
        return self.count > 1

    def torchrun(self, run: str) -> list[str]:
        """Arguments of torchrun that bring the hosts together, or the ranks of this one; ``run`` names the run.

        Raises:
            ValueError: the first host cannot be reached by any interface.
        """
        where = [
            "--max-restarts",
            str(self.restarts),
            "--nnodes",
            str(self.count),
            "--node-rank",
            str(self.rank),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{self.address}:{self.port}",
        ]
        # torchrun looks for its own name behind the address, which a host need not find.
        waits = f"is_host={self.rank == 0},join_timeout={self.seconds},read_timeout={self.seconds}"
        return [*where, "--rdzv-conf", waits, "--rdzv-id", run, "--local-addr", own_address(self.address, self.port, self.address_by)]


def from_environment(environ: Mapping[str, str]) -> Hosts:
    """From ``NNODES NODE_RANK MASTER_ADDR MASTER_PORT``, or inside ``srun`` from Slurm's own; the former win. ``TIO_RENDEZVOUS_SECONDS``: patience;
    ``MAX_RESTARTS``: of all ranks.

    Raises:
        ValueError: a variable that is missing or is no number of the kind it must be.

    >>> from_environment({})
    Hosts(count=1, rank=0, address='127.0.0.1', port=0, seconds=600, restarts=0)
    >>> from_environment({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    Hosts(count=2, rank=1, address='10.0.0.1', port=29500, seconds=600, restarts=0)
    >>> from_environment({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "gpu[03-04,09]"})
    Hosts(count=2, rank=1, address='gpu03', port=20007, seconds=600, restarts=0)
    """
    slurm = "SLURM_JOB_ID" in environ and "SLURM_NODEID" in environ  # inside srun; a job's own script runs on one host before that
    count, count_by = _number(environ, "NNODES", "SLURM_NNODES" if slurm else None, least=1, default=1)
    restarts, _ = _number(environ, "MAX_RESTARTS", None, least=0, default=0)
    if count == 1:
        return Hosts(restarts=restarts)
    rank, rank_by = _number(environ, "NODE_RANK", "SLURM_NODEID" if slurm else None, least=0, default=None)
    if rank >= count:
        raise ValueError(f"{rank_by} {rank}: with {count_by} {count} hosts are numbered 0 to {count - 1}")
    listed = environ.get("SLURM_JOB_NODELIST", "") if slurm else ""
    address, address_by = environ.get("MASTER_ADDR") or first_host(listed), "MASTER_ADDR" if environ.get("MASTER_ADDR") else "SLURM_JOB_NODELIST"
    if not address:
        why = f"SLURM_JOB_NODELIST names no host ({listed[:80]!r}), and MASTER_ADDR is not set either" if slurm else "MASTER_ADDR is not set"
        raise ValueError(f"{why}: with {count_by} {count} it must be the address of the first host, the same on all")
    port = SLURM_PORTS[int(re.sub(r"[^0-9]", "", environ["SLURM_JOB_ID"])[-18:] or 0) % len(SLURM_PORTS)] if slurm else None
    meet, port_by = _number(environ, "MASTER_PORT", None, least=1, default=port, most=65535)
    seconds, _ = _number(environ, "TIO_RENDEZVOUS_SECONDS", None, least=1, default=600)
    return Hosts(count, rank, address, meet, seconds, restarts, address_by, port_by or "the port chosen by SLURM_JOB_ID,", rank_by)


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list.

    >>> [first_host(nodes) for nodes in ("a1,a2", "a[3-4]", "rack[02-04]-n7,b", "x[5,7]", "")]
    ['a1', 'a3', 'rack02-n7', 'x5', '']
    """
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None
    return (match[1] or "") + (match[2] or "") + (match[3] or "")


def own_address(there: str, port: int, by: str = "MASTER_ADDR") -> str:
    """This host's address on the way to ``there``, which the variable ``by`` has named. Asks the routing table; nothing is sent.

    Raises:
        ValueError: the name does not resolve, or no interface leads there.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(there, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: no name at all, such as ".."
        why = error.strerror if isinstance(error, OSError) else None
        raise ValueError(f"{by} {there[:80]}: this host cannot reach it ({why or error}); is the name right, and is the interface up?") from error


def _addresses(name: str) -> set[str]:
    """What a name stands for, without the interface that an IPv6 address may name."""
    return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, None)}


def interface_of(address: str) -> str | None:
    """The name of this host's interface that has ``address``; None where no interface has it (IPv6 is not looked at)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            try:
                held = fcntl.ioctl(control, SIOCGIFADDR, struct.pack("16sH14x", name.encode()[:15], socket.AF_INET))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(held[20:24]) == address:
                return name
    return None


def _is_loopback(name: str) -> bool:
    """Whether somebody has named this host alone, on purpose."""
    return name in ("localhost", "::1") or name.startswith("127.")


def _number(environ: Mapping[str, str], name: str, other: str | None, *, least: int, default: int | None, most: int | None = None) -> tuple[int, str]:
    """The number, and the variable that it is from (empty: the default)."""
    for variable in (name, other):
        text = environ.get(variable, "") if variable else ""
        if text:
            if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) < least or (most is not None and int(text) > most):
                limits = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ValueError(f"{variable} must be a whole number {limits}, got {shown(text)}")
            return int(text), variable
    if default is None:
        either = f" ({other} neither)" if other else ""
        raise ValueError(f"{name} is not set{either}: with several hosts each needs its own, and all the same MASTER_ADDR and MASTER_PORT")
    return default, ""

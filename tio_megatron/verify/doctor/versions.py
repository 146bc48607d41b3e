"""Which packages are here, and which of them this package knows."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator, Sequence

from tio_megatron.findings.finding import Finding
from tio_megatron.integrations import releases, strangers
from tio_megatron.integrations.megatron.versions import FULL

TOPIC = "versions"
PYTHON = (3, 11)
SUPPORTED = ("torch", "megatron-core", "vllm")
"""Packages that the integrations know in certain versions only."""


TESTED = {
    "transformers": ("5.19.0",),
    "tokenizers": ("0.23.3",),
    "safetensors": ("0.8.0",),
    "numpy": ("2.3.5",),
    "triton": ("3.7.1", "3.9.0"),
    "vllm-ascend": ("0.23.0",),
    "torch-npu": ("2.13.0", "2.10.0"),
    "verl": (),
    "transformer-engine": (),
    "mindspeed": (),
    "flash-attn": (),
}
"""Packages beside those that can move a number or a token, and the releases that tests ran with or, on an NPU, were written against. Empty: none."""


def supported() -> dict[str, tuple[str, ...]]:
    """The versions of each that work, as the integrations state them, the one that does everything first."""
    megatron = sorted(releases.SUPPORTED["megatron-core"], key=lambda version: version != FULL)
    return {package: releases.SUPPORTED[package] for package in SUPPORTED} | {"megatron-core": tuple(megatron)}


def on_npu() -> dict[str, tuple[str, ...]]:
    """The versions that a rollout's environment has on an NPU, where vllm-ascend is installed: other ones, for an older vLLM."""
    return releases.ON_ASCEND if releases.installed("vllm-ascend") else {}


def check(needed: Sequence[str] = (), device: str = "cpu") -> Iterator[Finding]:
    """Python and every package of :data:`SUPPORTED`; one that is ``needed`` and absent is bad, else worth a note.

    Args:
        needed: packages.
        device: ``npu``: what vllm-ascend asks for counts where it is installed.
    """
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON:
        yield Finding(f"Python {found}", "Python 3.11 would work", topic=TOPIC)
    else:
        yield Finding(f"Python {found} on {platform.machine()}", level="ok", topic=TOPIC)
    works = supported()
    ascend = on_npu() if device == "npu" else {}
    works |= {package: known for package, known in ascend.items() if package in works}
    for package in SUPPORTED:
        version = releases.installed(package)
        if version is None:
            yield Finding(
                f"{package} is not installed",
                f"{package} {works[package][0]} works" if package in works else f"{package} works",
                level="bad" if package in needed else "note",
                topic=TOPIC,
            )
        elif package in works and version.partition("+")[0] not in works[package]:
            known = " or ".join(works[package])
            yield Finding(f"{package} {version} is installed: its symbols and arithmetic are not known here", f"{package} {known} works", topic=TOPIC)
        elif package == "megatron-core" and version != works.get(package, (version,))[0]:
            yield Finding(
                f"megatron-core {version} scores under a contract and does not train", f"megatron-core {works[package][0]} does both", level="note", topic=TOPIC
            )
        else:
            yield Finding(f"{package} {version}", level="ok", topic=TOPIC)
    if device == "npu" and not ascend and releases.installed("vllm") is not None:
        what = "vllm-ascend is not installed: an engine on an NPU needs it, and the vLLM and torch that it is for"
        yield Finding(what, "look where the rollout runs", level="note", topic=TOPIC)
    yield from untested()
    yield from _strangers()


def untested() -> Iterator[Finding]:
    """Packages of :data:`TESTED` that are installed in a release nobody tested. No symbol of theirs is patched, so nothing is refused."""
    for package, known in TESTED.items():
        version = releases.installed(package)
        if version is None or version.partition("+")[0] in known:
            continue
        works = f"{package} {' or '.join(known)}" if known else "compare a small run with one without it (tio logdiff)"
        yield Finding(f"{package} {version} is installed: nobody has tested tio_megatron with this release", works, level="note", topic=TOPIC)


def _strangers() -> Iterator[Finding]:
    """Packages that megatron-core picks up by import where it finds them."""
    for module, replaced in (
        ("apex", "fused Adam, norms, gradient norm"),
        ("transformer_engine", "linears, attention, norms, Adam"),
        ("mindspeed", "attention, norms, experts, optimizer"),
    ):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # absent, or an empty folder of that name
            continue
        unrelated = strangers.unrelated_apex() if module == "apex" else None
        if unrelated is not None:
            yield Finding(
                f"{unrelated} is PyPI's unrelated project, not NVIDIA's: megatron-core tries to use it", "pip uninstall apex", level="note", topic=TOPIC
            )
            continue
        yield Finding(
            f"{module} is importable: stock megatron-core takes {replaced} from it, so ranks or sides without it compute otherwise",
            "install it on all ranks or on none; under the contract its sums are not used",
            level="note",
            topic=TOPIC,
        )

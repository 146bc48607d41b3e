"""Packages that megatron-core picks up by their name, and that are another project's. Looks at files; imports none of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tio_megatron.integrations import releases


def unrelated_apex() -> str | None:
    """Where and what the importable ``apex`` is, if it is neither NVIDIA's nor Ascend's: PyPI has another project of that name.

    Both have ``apex.optimizers``. Its folder is looked at and nothing of it runs: that project's own import can fail.
    """
    held = sys.modules.get("apex")  # None there forbids its import
    try:
        spec = getattr(held, "__spec__", None) if held is not None else None if "apex" in sys.modules else importlib.util.find_spec("apex")
    except ValueError:  # a module that somebody made by hand has no spec
        return None
    if spec is None or spec.origin is None:  # absent, or a folder of that name without code
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / name).exists() for folder in folders for name in ("optimizers", "optimizers.py")):
        return None
    return f"{' '.join(['apex', *filter(None, [releases.installed('apex')])])} in {Path(spec.origin).parent}"


def apex_warning() -> str | None:
    """One line about :func:`unrelated_apex`, with what to change."""
    found = unrelated_apex()
    if found is None:
        return None
    return (
        f"{found} is not NVIDIA's or Ascend's apex but another project of that name (PyPI's): megatron-core tries to take fused Adam and norms from it; "
        "pip uninstall apex. Nothing of it is called under the contract"
    )

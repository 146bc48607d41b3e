"""Whether all ranks run the same software and the same model: a package on one rank alone would give that rank other numbers."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tio_megatron import kernels
from tio_megatron.integrations.megatron import state

_DISTRIBUTIONS = ("torch", "megatron-core", "numpy")
_OPTIONAL = {"apex": "apex", "amp_C": "amp_C", "transformer_engine": "transformer-engine", "mindspeed": "mindspeed", "torch_npu": "torch-npu"}
"""Packages that megatron-core takes numbers from where it finds them: name to import, and of the distribution."""


def environment() -> dict[str, str]:
    """What must be the same on every rank, by name: versions, optional packages, kernels, the contract in force."""
    found = {name: version_of(name) for name in _DISTRIBUTIONS}
    for module, distribution in _OPTIONAL.items():
        found[module] = version_of(distribution, "importable, without a version") if _importable(module) else "not importable"
    session = state.session()
    found["kernels"] = kernels.version() if session is None else kernels.version(session.contract.family)
    found["contract"] = "none" if session is None else session.contract.fingerprint(kernels.version(session.contract.family))
    found["vocab_size"] = "none" if session is None else str(session.vocab_size)
    return found


def model(config: Any) -> dict[str, str]:
    """What must be the same on every rank of a model's configuration: its numbers, words and dtypes, by name."""
    simple = (bool, int, float, str, torch.dtype, type(None))
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {f"model's {name}": str(value) for name, value in found.items() if isinstance(value, simple)}


def environment_differences(group: dist.ProcessGroup | None = None, config: Any = None) -> None:
    """Compare :func:`environment`, or the :func:`model` of ``config``, over the ranks of ``group`` (None: the world). Every rank must call it.

    Raises:
        ValueError: on every rank, naming each rank that differs from most, the field and both values.
    """
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, environment() if config is None else model(config), group=group)
    ranks = dist.get_process_group_ranks(group) if group is not None else range(len(everyone))
    lines = differences(everyone, list(ranks))
    if lines:
        raise ValueError(f"ranks run different {'software' if config is None else 'models'}, so their numbers would differ:\n  " + "\n  ".join(lines))


def differences(everyone: Sequence[dict[str, str]], ranks: Sequence[int]) -> list[str]:
    """One line per rank and field that is another than most ranks have."""
    lines = []
    for field in dict.fromkeys(field for theirs in everyone for field in theirs):
        values = [theirs.get(field, "not there") for theirs in everyone]
        # The lowest rank's value where two are equally common.
        usual = Counter(values).most_common(1)[0][0]
        lines += [f"rank {rank}: {field} is {value}, elsewhere {usual}" for rank, value in zip(ranks, values, strict=True) if value != usual]
    return lines


def version_of(distribution: str, otherwise: str = "not installed") -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def _importable(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None

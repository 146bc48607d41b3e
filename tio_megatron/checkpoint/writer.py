"""Writing an HF folder: complete or not at all."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tio_megatron.checkpoint.config import CheckpointConfig, CheckpointError
from tio_megatron.checkpoint.digest import tensor_digest
from tio_megatron.checkpoint.reader import INDEX, SINGLE
from tio_megatron.models import tensor_table

SHARD_BYTES = 4 << 30
_SPARE = 64 << 20


def write_checkpoint(
    path: Path | str,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
    files: Iterable[Path] = (),
) -> dict[str, str]:
    """Write an HF folder; a reader sees the whole folder or none. Replaces a folder already there.

    Everything goes to a folder beside ``path`` that takes its name at the end; on any error that folder is removed. At most
    ``shard_bytes`` of tensors are held in memory.

    Args:
        path: the folder to make.
        config: contents of ``config.json``.
        tensors: every tensor of the model by HF name, in any order.
        shard_bytes: bytes of tensors in one file; more than one file come with an index.
        files: further files to copy into the folder (tokenizer).

    Returns:
        The manifest: HF name -> digest.

    Raises:
        CheckpointError: a tensor is missing, unknown, given twice or of another shape or dtype, or the disk is too small.
    """
    path = Path(path)
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{path}: the configuration is {type(config).__name__}; expected the contents of a config.json")
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise CheckpointError(f"{path}: shard_bytes is {shard_bytes!r}; expected a whole number of bytes, at least 1")
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: is a file, not a folder; name a folder, or a path where one can be made")
    checked = CheckpointConfig.from_dict(config)
    table = tensor_table(checked.shape)
    width = {"bfloat16": 2, "float32": 4}[checked.dtype]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    need, free = sum(spec.numel for spec in table.values()) * width + _SPARE, shutil.disk_usage(path.parent).free
    if need > free:
        raise CheckpointError(f"{path}: needs {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free on that disk; choose another folder")
    draft = path.parent / f".{path.name}.draft-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        digests = _write_tensors(draft, table, checked.dtype, tensors, shard_bytes)
        (draft / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for file in files:
            shutil.copyfile(file, draft / file.name)
        _swap(draft, path)
    except (OSError, SafetensorError) as error:  # safetensors has its own word for what the system refuses
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return digests


def _write_tensors(draft: Path, table: Mapping[str, Any], dtype: str, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> dict[str, str]:
    digests: dict[str, str] = {}
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal held, size
        save_file(held, draft / f"part-{len(shards):05d}", metadata={"format": "pt"})
        shards.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        if name not in table:
            raise CheckpointError(f"{draft.name}: tensor {name} has no place in the model")
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{draft.name}: {name} is {type(tensor).__name__}, not a tensor")
        if name in digests:
            raise CheckpointError(f"{draft.name}: tensor {name} was given twice")
        if tuple(tensor.shape) != table[name].shape or str(tensor.dtype) != f"torch.{dtype}":
            raise CheckpointError(f"{draft.name}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, the model has {dtype} {list(table[name].shape)}")
        if held and size + tensor.nbytes > shard_bytes:
            flush()
        plain = tensor.detach().cpu().contiguous()
        held[name] = plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()  # safetensors refuses views of one storage
        digests[name] = tensor_digest(held[name])
        size += tensor.nbytes
    missing = [name for name in table if name not in digests]
    if missing:
        raise CheckpointError(f"{draft.name}: {len(missing)} tensors were not given, the first is {missing[0]}")
    flush()
    if len(shards) == 1:
        (draft / "part-00000").rename(draft / SINGLE)
        return digests
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (draft / f"part-{i:05d}").rename(draft / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(f.stat().st_size for f in draft.glob("*.safetensors"))}, "weight_map": weight_map}
    (draft / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return digests


def _swap(draft: Path, path: Path) -> None:
    """Give ``draft`` the name ``path``. A folder that has files cannot be replaced: the two change names at once, where the system can do that;
    else the older one steps aside first, and a kill between the two moves leaves it under its other name.
    """
    if not path.exists():
        try:
            draft.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        # another process gave its own draft this name since: the later one stands, as it would a moment after
    if _exchange(draft, path):
        return  # the older one is the draft now, which the caller removes
    old = path.parent / f".{path.name}.old-{os.getpid()}"
    path.rename(old)
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)

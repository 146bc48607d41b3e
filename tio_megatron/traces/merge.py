"""Ranks' parts of a trace become one: digests, sums of squares and column counts are added, kept tensors are put together byte by byte."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tio_megatron.files.safe_file import TYPES, SafeFile
from tio_megatron.files.strict_json import read_json
from tio_megatron.files.whole import write_whole
from tio_megatron.traces.reader import PASSES, Trace
from tio_megatron.traces.writer import write_arrays, write_header


def merge_parts(parts: Sequence[Path], folder: Path) -> None:
    """Write the whole trace to ``folder`` from the finished ``parts`` of its ranks. Every element must have come from one rank.

    Raises:
        ValueError: parts of different runs, or rows that two ranks recorded.
    """
    traces = [Trace(part) for part in parts]
    first = traces[0]
    header = read_json((parts[0] / "trace.json").read_text())
    for trace in traces[1:]:
        if trace.lengths != first.lengths or (trace.tokens != first.tokens).any() or trace.shape != first.shape:
            raise ValueError(f"{trace.folder} and {first.folder} are parts of different runs")
    arrays: dict[str, np.ndarray[Any, Any]] = {"tokens": first.tokens, "sequence": np.repeat(np.arange(len(first.lengths), dtype=np.int32), first.lengths)}
    arrays |= {name: np.max([trace.passes[name] for trace in traces], axis=0) for name in PASSES}
    points: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for trace in traces for name in trace.recorded):
        holders = [trace for trace in traces if name in trace.recorded]
        entry = dict(holders[0].recorded[name])
        for trace in holders[1:]:
            if trace.recorded[name]["shape"] != entry["shape"] or trace.recorded[name]["dtype"] != entry["dtype"]:
                raise ValueError(f"{name}: {trace.recorded[name]} in {trace.folder}, {entry} in {holders[0].folder}")
        entry["largest"] = max(trace.recorded[name]["largest"] for trace in holders)
        entry["nonfinite"] = sum(trace.recorded[name]["nonfinite"] for trace in holders)
        points[name] = entry
        with np.errstate(over="ignore"):
            arrays[name] = np.asarray(np.sum([trace.digests(name) for trace in holders], axis=0, dtype=np.int64))
        arrays[f"{name}#squares"] = np.asarray(np.sum([trace.squares(name) for trace in holders], axis=0, dtype=np.float32))
        seen = np.asarray(np.sum([trace.columns(name) for trace in holders], axis=0, dtype=np.int32))
        arrays[f"{name}#columns"] = seen
        width = math.prod(entry["shape"])
        if int(seen.max(initial=0)) > width:
            raise ValueError(f"{name}: {seen.max()} of {width} columns were recorded: two ranks recorded the same ones")
        if any(name in trace.kept for trace in holders):
            _join("values", name, [trace.folder for trace in holders if name in trace.kept], folder)
    for trace in traces:
        for path in (trace.folder / "weights").glob("*.safetensors"):
            if not (folder / "weights" / path.name).exists():
                (folder / "weights").mkdir(parents=True, exist_ok=True)
                path.replace(folder / "weights" / path.name)
        if (trace.folder / "sketches.safetensors").exists() and not (folder / "sketches.safetensors").exists():
            (trace.folder / "sketches.safetensors").replace(folder / "sketches.safetensors")
        header["weights"] |= trace.weights
    folder.mkdir(parents=True, exist_ok=True)
    write_arrays(folder / "rows.safetensors", arrays)
    header |= {"points": points, "kept": sorted({name for trace in traces for name in trace.kept}), "ranks": len(parts)}
    write_whole(folder / "trace.json", json.dumps(header).encode())


def _join(kind: str, name: str, parts: list[Path], folder: Path) -> None:
    """Each part holds zeros where others wrote, so bytes are joined by or."""
    (folder / kind).mkdir(parents=True, exist_ok=True)
    target = folder / kind / f"{name}.safetensors"
    whole: np.memmap[Any, np.dtype[np.uint8]] | None = None
    for part in parts:
        with SafeFile(part / kind / f"{name}.safetensors") as file:
            entry = file.entries[name]
            size = entry.numel * np.dtype(TYPES[entry.type]).itemsize
            if not target.exists():
                start = write_header(target, {name: (entry.type, entry.shape, size)})
                whole = np.memmap(target, dtype=np.uint8, mode="r+", offset=start, shape=(size,)) if size else None
            if whole is not None:
                np.bitwise_or(whole, file.raw(name).reshape(-1).view(np.uint8), out=whole)

"""Reads recordings of token log-probabilities, one sequence at a time; every file is data, nothing in it is ever executed or unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tio_megatron.findings.messages import named
from tio_megatron.verify.readers.arrays import read_npz, read_safetensors
from tio_megatron.verify.readers.jsonl import BOM, read_jsonl, read_tokens
from tio_megatron.verify.readers.scored import Scored, require_file

__all__ = ["Scored", "files_of", "read_scored", "read_tokens"]


def read_scored(path: Path | str, field: str | None = None) -> Iterator[Scored]:
    """The sequences of a recording, in its order; memory holds one of them. The kind of file is known by its first bytes, not by its name.

    Args:
        path: JSONL (verl's ``rollout_data_dir`` dumps too), safetensors or npz; or a folder, of which :func:`files_of` are read.
        field: which log-probabilities, where a file holds several (``rollout_log_probs``, ``old_log_probs``).

    Raises:
        ValueError: no such file, an unknown or damaged one, or an entry that is no log-probability; says where.
    """
    path = Path(path)
    if path.is_dir():
        for file in files_of(path)[0]:
            yield from (read_safetensors if file.suffix == ".safetensors" else read_jsonl)(file, field)
        return
    require_file(path)
    with path.open("rb") as opened:
        start = opened.read(16)
    if not start:
        raise ValueError(f"{path}: an empty file")
    if start[:4] == b"PK\x03\x04" or start[:4] == b"PK\x05\x06":
        yield from read_npz(path, field)
    elif start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        yield from read_safetensors(path, field)
    elif start.removeprefix(BOM).lstrip()[:1] == b"{":
        yield from read_jsonl(path, field)
    elif start[:1] == b"\x80" or start[:6] == b"\x93NUMPY":
        what = "a pickle" if start[:1] == b"\x80" else "a single numpy array"
        raise ValueError(f"{path}: {what}, which is not read; write JSONL, safetensors or npz")
    elif start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{path}: text in UTF-16; write JSON lines in UTF-8")
    else:
        raise ValueError(f"{path}: neither JSONL, safetensors nor npz (it starts with {start[:8]!r})")


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Of a folder the files that are read as one recording, in order, and the ``*.jsonl`` that are left out.

    A store of rollouts: its batches. Else the files that verl numbers by step (``1.jsonl``, ``2.jsonl``, ...), or the only ``*.jsonl`` there is.

    Raises:
        ValueError: neither; names what is there.
    """
    if (folder / "store.json").is_file():
        return sorted(folder.glob("*.safetensors")), []
    found = sorted(folder.glob("*.jsonl"))
    numbered = sorted((file for file in found if file.stem.isascii() and file.stem.isdigit()), key=lambda file: (int(file.stem), file.name))
    if numbered:
        return numbered, [file for file in found if file not in numbered]
    if len(found) == 1:
        return found, []
    if not found:
        raise ValueError(f"{folder}: a folder without *.jsonl; give a file, a folder of rollout dumps (1.jsonl, 2.jsonl, ...) or a store of rollouts")
    there = named([file.name for file in found])
    raise ValueError(
        f"{folder}: a folder with several recordings or other files ({there}), none numbered as rollout dumps are (1.jsonl, 2.jsonl, ...); name one"
    )

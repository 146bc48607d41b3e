"""The header of a safetensors file: 8 bytes with its length, then one JSON object. Read before any array is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import cut

LONGEST = 100_000_000
"""Bytes of a header that the safetensors library reads."""


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header of the file at ``path``, where the arrays start, and the size of the file.

    Raises:
        ValueError: the file is cut off or something else, or its header is no JSON object or has a name twice.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        return parse_header(first, file.read(min(int.from_bytes(first, "little"), LONGEST)), size, str(path)), 8 + int.from_bytes(first, "little"), size


def parse_header(first: bytes, rest: bytes, size: int, where: str) -> dict[str, Any]:
    """The same of the first 8 bytes, what follows them, and the size of the whole.

    Raises:
        ValueError: as :func:`read_header`.
    """
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(size - 8, LONGEST):
        raise ValueError(f"{where}: no safetensors file, or cut off: a header of {length} bytes is announced in a file of {size}")
    try:
        header = read_json(rest[:length])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: a damaged safetensors header ({cut(str(error))})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{where}: a damaged safetensors header (no object)")
    return header

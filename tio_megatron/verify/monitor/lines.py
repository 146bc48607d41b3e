"""Lines of a file that others read while it grows."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tio_megatron.files.whole import naming


def append_line(path: Path, line: bytes) -> None:
    """Append ``line`` whole or not at all: a write that fails in the middle is taken back.

    Raises:
        OSError: it cannot be written; the file then ends with the line before.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        try:
            with naming(path):
                if os.write(file, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)

"""TensorBoard's event files, as far as numbers over steps need them: written here in 50 lines, so that the package need not be installed to train.

A file is a row of records: length (8 bytes), its checksum (4), an ``Event`` message, its checksum. Read it with any TensorBoard.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tio_megatron.files.whole import naming


class EventFile:
    """One new file in ``folder``; each call of :meth:`add` appends whole records."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{int(time.time())}.tio.{os.getpid()}"  # TensorBoard's own has the host's name there
        self._append(_bytes(3, b"brain.Event:2"))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of one step, each under its name."""
        values = b"".join(_bytes(1, _bytes(1, name.encode()) + b"\x15" + struct.pack("<f", number)) for name, number in numbers.items())
        self._append(b"\x10" + _varint(step) + _bytes(5, values))

    def _append(self, rest: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + rest
        length = struct.pack("<Q", len(event))
        with naming(self.path), open(self.path, "ab") as file:
            file.write(length + _checksum(length) + event + _checksum(event))


def _bytes(field: int, content: bytes) -> bytes:
    """A field of a protocol buffer with a length in front."""
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _table()


def crc32c(content: bytes) -> int:
    """Castagnoli's checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _checksum(content: bytes) -> bytes:
    """Rotated and shifted, as the format wants it for checksums that are stored beside what they are of."""
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

"""Valid files made invalid, the same way for one seed: flipped bits, cuts, lies about lengths, odd values in JSON, deep nesting. For tests only."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**19, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "x", "0", "..", "../x", "/etc/passwd", "a/b", "\0", "\ud800", "x" * 5000, "ü 名 \U0001f600",
    [], [[]], {}, {"x": 1}, [1, 2], [None], ["x"], [2**63], [-1], [1e308],
)  # fmt: skip
"""What may stand where something else is expected."""
_WORDS = (
    b"-1", b"0", b"1e999", b"NaN", b"null", b"true", b'"x"', b"[]", b"{}", b"9" * 30, b"9" * 6000, b"0x10", b"1.5", b"--", b"&a",
    b"*a", b"!!python/object:os.x",
)  # fmt: skip
Mutate = Callable[[random.Random, bytes], bytes]


def mutated(draw: random.Random, raw: bytes) -> bytes:
    """``raw``, changed in one or two ways; sometimes as what it is (JSON, lines of JSON, safetensors), more often as bytes."""
    kinds: list[Mutate] = [_bits, _cut, _delete, _repeat, _word, _insert, _length]
    for structured in (_json, _lines, _safetensors):
        if structured(random.Random(0), raw) is not None:
            kinds += [structured] * 7  # type: ignore[list-item]
    for _ in range(draw.choice((1, 1, 1, 2))):
        made = draw.choice(kinds)(draw, raw)
        raw = raw if made is None else made
    return raw


def _place(draw: random.Random, raw: bytes) -> int:
    """Mostly near the start, where headers are."""
    return draw.randrange(min(len(raw), draw.choice((16, 200, 2000, 1 << 30))) or 1)


def _bits(draw: random.Random, raw: bytes) -> bytes:
    held = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 16))):
        if held:
            held[_place(draw, raw)] ^= 1 << draw.randrange(8)
    return bytes(held)


def _cut(draw: random.Random, raw: bytes) -> bytes:
    return raw[: draw.choice((0, 1, 7, 8, 9, len(raw) - 1, draw.randrange(len(raw) or 1)))]


def _delete(draw: random.Random, raw: bytes) -> bytes:
    at = _place(draw, raw)
    return raw[:at] + raw[at + draw.choice((1, 4, 8, 100)) :]


def _repeat(draw: random.Random, raw: bytes) -> bytes:
    at = _place(draw, raw)
    piece = raw[at : at + draw.choice((1, 8, 64, 4096))]
    return raw[:at] + piece * draw.choice((2, 3, 50)) + raw[at:]


def _word(draw: random.Random, raw: bytes) -> bytes:
    """Another word in the place of a number."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", raw[:20000]))
    if not found:
        return raw
    chosen = draw.choice(found)
    return raw[: chosen.start()] + draw.choice(_WORDS) + raw[chosen.end() :]


def _insert(draw: random.Random, raw: bytes) -> bytes:
    at = _place(draw, raw)
    what = (b"\0", b"\xff\xfe", b"\r\n", b"\n", b"[" * 100_000, b'{"a":' * 20_000, b"\xed\xa0\x80", b" " * 10_000, b"- " * 2000)
    return raw[:at] + draw.choice(what) + raw[at:]


def _length(draw: random.Random, raw: bytes) -> bytes:
    """Another length in the first eight bytes, as safetensors has it."""
    return struct.pack("<Q", draw.choice((0, 1, 2, 8, len(raw), max(0, len(raw) - 8), 2**20, 2**31, 2**40, 2**63, 2**64 - 1))) + raw[8:]


def odd_json(draw: random.Random, value: Any) -> Any:
    """A copy with one value replaced, removed, renamed, doubled or nested deeply."""
    try:
        value = copy.deepcopy(value)
        places = list(_places(value))
    except RecursionError:  # nested deeply by the change before
        return draw.choice(ODD)
    if not places:
        return draw.choice(ODD)
    owner, key = draw.choice(places[:400])
    what = draw.random()
    if what < 0.65:
        owner[key] = draw.choice(ODD)
    elif what < 0.75:
        del owner[key]
    elif what < 0.85:
        old = owner[key]
        if isinstance(owner, dict):
            owner[draw.choice(("x", "", "__metadata__", "../x", "\0"))] = old
        else:
            owner.append(old)
    elif what < 0.95:
        other, place = draw.choice(places)
        owner[key] = copy.deepcopy(other[place])
    else:
        nested: Any = 1
        for _ in range(draw.choice((3, 900))):
            nested = [nested]
        owner[key] = nested
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
    for key in keys:
        yield from _places(value[key])


def _dumped(value: Any) -> bytes:
    text = json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _json(draw: random.Random, raw: bytes) -> bytes | None:
    held = _parsed(raw)
    return None if held is None else _dumped(odd_json(draw, held))


def _lines(draw: random.Random, raw: bytes) -> bytes | None:
    lines = raw.splitlines()
    if len(lines) < 2 or _parsed(lines[0]) is None:
        return None
    at = draw.randrange(len(lines))
    held = _parsed(lines[at])
    lines[at] = lines[at] if held is None else _dumped(odd_json(draw, held))
    return b"\n".join(lines) + b"\n"


def _safetensors(draw: random.Random, raw: bytes) -> bytes | None:
    if len(raw) < 10 or raw[8:9] != b"{":
        return None
    length = int.from_bytes(raw[:8], "little")
    header = _parsed(raw[8 : 8 + length]) if length < 1 << 20 else None
    if not isinstance(header, dict):
        return None
    text = _dumped(odd_json(draw, header))
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]

"""Recordings as JSON lines: our own, and what verl writes to ``trainer.rollout_data_dir``.

Ours: ``{"tokens": [ids], "logprobs": [numbers]}``, a line per sequence. As many log-probabilities as tokens, or fewer: those of the last ones; a
``null`` in front stands for a token that has none.

verl (``<step>.jsonl``) writes ``input``, ``output`` and (0.6.1, 0.7.0; not 0.4.1, 0.5.0) ``gts`` as text, ``score``, ``step``, and whatever the reward
function returned for each sample. There is no log-probability in it and no token id. A recipe that adds them to its reward's extra information
(``responses``: token ids, ``rollout_log_probs``, ``old_log_probs``: lists, the names they have in verl's batch) can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import named, shown
from tio_megatron.verify.readers.scored import LOGPROB_FIELDS, TOKEN_FIELDS, Scored, require_file

BOM = b"\xef\xbb\xbf"
"""Some editors write it before UTF-8 text; it says nothing."""
_MASKS = ("response_mask", "mask")
PADDED = "responses"
"""verl's tensor of responses, padded on the right; the lists ``response_ids`` of its agent loop are not padded."""


def read_jsonl(path: Path, field: str | None) -> Iterator[Scored]:
    """See :func:`tio_megatron.verify.readers.read_scored`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                entry = read_json(line)
            except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
                cut = "the file is cut off in the middle of it" if not line.endswith(b"\n") else "it is no JSON"
                raise ValueError(f"{where}: {cut} ({error})") from None
            if not isinstance(entry, dict):
                raise ValueError(f"{where}: a JSON object was expected, this is a {type(entry).__name__}")
            yield _scored(entry, field, where)


def read_tokens(path: Path) -> list[list[int]]:
    """Token ids of a file of JSON lines: objects as above (log-probabilities are not needed), or plain lists of ids.

    Raises:
        ValueError: no such file, no JSON, or no token ids; says where.
    """
    require_file(path)
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = read_json(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: it is no JSON ({error})") from None
        prompt: list[int] = []
        if isinstance(entry, dict):
            ids = next((key for key in TOKEN_FIELDS if key in entry), None)
            if ids is None:
                raise ValueError(f"{where}: no token ids; one of {', '.join(TOKEN_FIELDS)} is needed")
            if ids.startswith("response"):
                prompt = next((entry[key] for key in ("prompts", "prompt_ids", "prompt_token_ids") if key in entry), [])
            entry = entry[ids]
        tokens = _integers([*prompt, *entry] if isinstance(entry, list) else entry, "tokens", where).tolist()
        if not tokens:
            raise ValueError(f"{where}: an empty sequence")
        found.append(tokens)
    if not found:
        raise ValueError(f"{path}: no sequence")
    return found


def _scored(entry: dict[str, Any], field: str | None, where: str) -> Scored:
    name = _logprob_field(entry, field, where)
    values = _numbers(entry[name], name, where, nulls=True)
    ids = next((key for key in TOKEN_FIELDS if key in entry), None)
    if ids is None:
        raise ValueError(f"{where}: {name!r} without token ids; one of {', '.join(TOKEN_FIELDS)} is needed")
    tokens = _integers(entry[ids], ids, where)
    if ids.startswith("response"):
        mask = next((key for key in _MASKS if key in entry), None)
        if mask is not None:  # verl pads responses on the right
            chosen = _integers(entry[mask], mask, where).astype(bool)
            if len(chosen) != len(tokens) or len(values) != len(tokens):
                raise ValueError(f"{where}: {len(chosen)} entries in {mask!r}, {len(values)} in {name!r}, {len(tokens)} in {ids!r}")
            tokens, values = tokens[chosen], values[chosen]
        elif ids == PADDED:
            raise ValueError(f"{where}: {ids!r} is padded and no mask says which ids are tokens; one of {', '.join(_MASKS)} is needed beside it")
        elif len(values) != len(tokens):
            raise ValueError(f"{where}: {len(values)} entries in {name!r} for {len(tokens)} in {ids!r}")
    empty = np.isnan(values)
    leading = int(np.argmin(empty)) if len(values) and not empty.all() else len(values)
    if entry[name][:1] == [None]:
        if len(values) != len(tokens):
            raise ValueError(f"{where}: {name!r} starts with null but has {len(values)} entries for {len(tokens)} tokens")
        values = values[leading:]
    return Scored(tokens, values, where)


def _logprob_field(entry: dict[str, Any], field: str | None, where: str) -> str:
    if field is not None:
        if field not in entry:
            raise ValueError(f"{where}: no field {field!r}; it has {named([*entry])}")
        return field
    found = [name for name in LOGPROB_FIELDS if name in entry]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{where}: several log-probabilities ({', '.join(found)}); choose one by name (--field-a, --field-b)")
    if {"input", "output", "score"} <= entry.keys():
        raise ValueError(
            f"{where}: a rollout dump of verl, which holds text and scores but no log-probabilities. Let the reward function return "
            "'responses' (token ids) and 'rollout_log_probs' or 'old_log_probs' (lists) in its extra information, and they stand in the dump"
        )
    raise ValueError(f"{where}: no log-probabilities; one of {', '.join(LOGPROB_FIELDS)} is needed, there is {named([*entry]) or 'nothing'}")


def _numbers(values: Any, name: str, where: str, nulls: bool) -> npt.NDArray[np.float32]:
    if not isinstance(values, list):
        raise ValueError(f"{where}: {name!r} must be a list of numbers")
    leading = True
    for at, value in enumerate(values):
        leading = leading and value is None
        if value is None and nulls and leading:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= 1 << 128):
            raise ValueError(f"{where}: {name!r}[{at}] is {shown(value)}, no number")
    return np.array([np.nan if value is None else value for value in values], dtype=np.float32)


def _integers(values: Any, name: str, where: str) -> npt.NDArray[np.int64]:
    if not isinstance(values, list):
        raise ValueError(f"{where}: {name!r} must be a list of integers")
    for at, value in enumerate(values):
        if not isinstance(value, int) or abs(value) >= 1 << 62:
            raise ValueError(f"{where}: {name!r}[{at}] is {shown(value)}, no token id")
    return np.array(values, dtype=np.int64)

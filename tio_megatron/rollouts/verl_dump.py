"""Imports what verl writes to ``trainer.rollout_data_dir``: ``<step>.jsonl``, one JSON object per sample.

verl itself writes ``input`` and ``output`` as text, ``gts``, ``score``, ``step``, and what the reward function returned. Where that includes token
ids and log-probabilities under verl's own names, a line is imported with the tokens that were sampled. verl's tensors ``prompts`` and ``responses``
are padded, on the left and on the right, and only its masks (``attention_mask`` over both, ``response_mask``) know which ids are tokens: without
them a line is refused. The lists ``prompt_ids`` and ``response_ids`` of its agent loop are not padded, and are taken as they are. Otherwise a
tokenizer must be given: the text is encoded again, which need not give the sampled tokens; such a batch says so in its ``source`` and holds no
log-probabilities, so it cannot be taken for a recording.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import shown
from tio_megatron.rollouts.batch import About, Batch
from tio_megatron.rollouts.errors import StoreError

AGAIN = "text encoded again"
"""What :attr:`About.source` says of a batch whose tokens are not known to be those that were sampled."""
_PROMPTS = ("prompts", "prompt_ids", "prompt_token_ids")
_RESPONSES = ("responses", "response_ids", "response_token_ids")
_LOGPROBS = ("rollout_log_probs", "logprobs")

Encode = Callable[[str], list[int]]


def from_verl(path: Path | str, about: About | None = None, *, encode: Encode | None = None, logprobs: str | None = None) -> Iterator[Batch]:
    """The batches of a dump, one per file.

    Args:
        path: a file, or a folder of files named by their steps.
        about: what verl does not write: contract, weights, temperature; ``step`` and ``source`` are filled in.
        encode: from text to token ids, for lines without token ids.
        logprobs: the field with the log-probabilities that were sampled with; by default ``rollout_log_probs``.

    Raises:
        StoreError: no such file, a damaged line, or a line whose tokens or log-probabilities cannot be told; says where.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl"), key=lambda file: (not file.stem.isdecimal(), int(file.stem) if file.stem.isdecimal() else 0, file.name))
    if path.is_file():
        files = [path]
    if not files:
        raise StoreError(f"{path}: no dump of rollouts (a .jsonl file, or a folder of them)")
    for file in files:
        yield _batch(file, about or About(), encode, logprobs)


def _batch(file: Path, about: About, encode: Encode | None, field: str | None) -> Batch:
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_row(_entry(line, f"{file}, line {number}"), encode, field, f"{file}, line {number}"))
    if not rows:
        raise StoreError(f"{file}: no line in it")
    for name in ("logprobs", "reward", "step", "again"):
        kinds = {row[name] if name in ("step", "again") else row[name] is None for row in rows}
        if len(kinds) > 1:
            raise StoreError(f"{file}: {name!r} is not alike in all lines; a file is one batch: split it")
    first = rows[0]
    groups: dict[str, int] = {}
    step = first["step"] if first["step"] is not None else about.step
    source = f"verl {file.name}" + (f", {AGAIN}" if first["again"] else "")
    try:
        return Batch.of(
            replace(about, step=step, source=source),
            [[*row["prompt"], *row["response"]] for row in rows],
            [len(row["prompt"]) for row in rows],
            None if first["logprobs"] is None else [row["logprobs"] for row in rows],
            rewards=None if first["reward"] is None else [row["reward"] for row in rows],
            groups=[groups.setdefault(json.dumps(row["prompt"]), len(groups)) for row in rows],
        )
    except StoreError as error:
        raise StoreError(f"{file}: {error}") from None


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = read_json(line)
    except (ValueError, RecursionError) as error:
        cut = "cut off in the middle of it" if not line.endswith(b"\n") else "no JSON"
        raise StoreError(f"{where}: {cut} ({error})") from None
    if not isinstance(entry, dict):
        raise StoreError(f"{where}: a JSON object was expected, this is a {type(entry).__name__}")
    return entry


def _row(entry: dict[str, Any], encode: Encode | None, field: str | None, where: str) -> dict[str, Any]:
    prompt, response = (_ids(entry, names, where) for names in (_PROMPTS, _RESPONSES))
    values = _numbers(entry, (field,) if field else _LOGPROBS, where)
    again = response is None
    if response is not None:
        if prompt is None:
            raise StoreError(f"{where}: token ids of the response but not of the prompt; one of {', '.join(_PROMPTS)} is needed beside them")
        prompt, response, values = _unpadded(entry, prompt, response, values, where)
    else:
        if values is not None:
            raise StoreError(f"{where}: log-probabilities without token ids; one of {', '.join(_RESPONSES)} is needed beside them")
        if encode is None:
            raise StoreError(f"{where}: text without token ids; give a tokenizer to encode it again, or let the reward function return the ids")
        prompt, response = _again(entry, encode, where)
    if not prompt:
        raise StoreError(f"{where}: an empty prompt")
    if values is not None and len(values) != len(response):
        raise StoreError(f"{where}: {len(values)} log-probabilities for {len(response)} tokens of the response")
    reward, step = entry.get("score"), entry.get("step")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max):
        raise StoreError(f"{where}: score {shown(reward)} is no finite number")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise StoreError(f"{where}: step {shown(step)} is no whole number from 0 on")
    return {"prompt": prompt, "response": response, "logprobs": values, "reward": reward, "step": step, "again": again}


def _unpadded(
    entry: dict[str, Any], prompt: list[int], response: list[int], values: list[float] | None, where: str
) -> tuple[list[int], list[int], list[float] | None]:
    """Without the padding in front of the prompt and behind the response, which the masks tell; no id does, since padding may be a token's."""
    attended, sampled = (_ids(entry, (name,), where) for name in ("attention_mask", "response_mask"))
    if attended is not None:
        if len(attended) != len(prompt) + len(response):
            raise StoreError(f"{where}: 'attention_mask' of {len(attended)} for {len(prompt)} + {len(response)} tokens of prompt and response")
        of_prompt, of_response = attended[: len(prompt)], attended[len(prompt) :]
        left = len(of_prompt) - sum(of_prompt)
        if of_prompt != [0] * left + [1] * (len(of_prompt) - left):
            raise StoreError(f"{where}: 'attention_mask' over the prompt must be zeros and then ones, as verl pads prompts")
        if sampled is not None and sampled != of_response:
            raise StoreError(f"{where}: 'attention_mask' and 'response_mask' differ over the response: tokens that were not sampled, as a tool's answer")
        prompt, sampled = prompt[left:], of_response
    elif _name(entry, _PROMPTS) == "prompts":
        raise StoreError(
            f"{where}: 'prompts' without 'attention_mask', which tells padding from tokens (verl pads prompts on the left); "
            "give the mask, or unpadded ids as 'prompt_ids'"
        )
    if sampled is not None:  # a hole would be a tool's answer, which was not sampled
        used = sum(sampled)
        if len(sampled) != len(response) or sampled != [1] * used + [0] * (len(sampled) - used):
            raise StoreError(f"{where}: the mask of {len(sampled)} for {len(response)} tokens of the response must be ones and then zeros")
        if values is not None and len(values) == len(response):
            values = values[:used]
        response = response[:used]
    elif _name(entry, _RESPONSES) == "responses":
        raise StoreError(
            f"{where}: 'responses' without 'response_mask' or 'attention_mask', which tell padding from tokens (verl pads responses on the right); "
            "give a mask, or unpadded ids as 'response_ids'"
        )
    return prompt, response, values


def _again(entry: dict[str, Any], encode: Encode, where: str) -> tuple[list[int], list[int]]:
    texts = [entry.get(name) for name in ("input", "output")]
    if not all(isinstance(text, str) for text in texts):
        raise StoreError(f"{where}: neither token ids nor the texts 'input' and 'output'")
    prompt, response = (encode(str(text)) for text in texts)
    return prompt, response


def _name(entry: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in entry), None)


def _ids(entry: dict[str, Any], names: tuple[str, ...], where: str) -> list[int] | None:
    name = _name(entry, names)
    if name is None:
        return None
    values = entry[name]
    if not isinstance(values, list) or not all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 for value in values):
        raise StoreError(f"{where}: {name!r} must be a list of token ids (whole numbers from 0 on)")
    return values


def _numbers(entry: dict[str, Any], names: tuple[str, ...], where: str) -> list[float] | None:
    name = _name(entry, names)
    if name is None:
        return None
    values = entry[name]
    if not isinstance(values, list) or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise StoreError(f"{where}: {name!r} must be a list of numbers")
    return values

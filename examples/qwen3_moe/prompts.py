"""The requests of a round: prompts of very different lengths, half of them greedy, half sampled with their own seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tio_megatron.files.strict_json import read_json
from tio_megatron.integrations.vllm.rollout import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LENGTHS = (1, 2, 17, 63, 64, 65, 130, 200, 321, 450)
"""Around the edges of a block of 64 keys, and beyond what one chunk of prefill takes."""
QUICK = (1, 17, 64, 65, 200, 321)


def requests(prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float, seed: int, round_number: int) -> list[Request]:
    """A greedy and a sampled request for each prompt. Seeds depend on round and request alone, so every rollout layout draws the same."""
    made = []
    for i, prompt in enumerate(prompts):
        made.append(Request(tuple(prompt), max_new_tokens))
        made.append(Request(tuple(prompt), max_new_tokens, temperature, (seed * 1_000_003 + round_number * 1009 + i) % 2**63))
    return made


def from_stream(stream: Sequence[int], lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of the given lengths cut out of a stream of tokens."""
    generator = np.random.default_rng(seed)
    starts = [int(generator.integers(0, len(stream) - length)) for length in lengths]
    return [[int(token) for token in stream[start : start + length]] for start, length in zip(starts, lengths, strict=True)]


def default_lengths(quick: bool, max_positions: int, max_new_tokens: int, lengths: Sequence[int] = LENGTHS) -> list[int]:
    """Lengths of the prompts that are made here, as far as the model takes them.

    Raises:
        ValueError: not one fits.
    """
    fitting = [length for length in (QUICK if quick else lengths) if length <= max_positions - max_new_tokens]
    if not fitting:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: at most {max_positions - 1} fit, prompt and all make {max_positions}")
    return fitting


def read(path: Path) -> list[str | list[int]]:
    """Prompts from JSON lines of ``{"text": ...}`` or ``{"tokens": [...]}``, each as it is given.

    Raises:
        ValueError: the file, the line and what is wrong with it.
        OSError: the file cannot be read.
    """
    prompts: list[str | list[int]] = []
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")  # other ends of lines that Unicode knows may stand inside a JSON string
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = read_json(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{path}, line {number}: nested too deeply") from error
        given = entry if isinstance(entry, dict) else {}
        tokens = given.get("tokens")
        if isinstance(given.get("text"), str):
            if any("\ud800" <= letter <= "\udfff" for letter in given["text"]):
                raise ValueError(f"{path}, line {number}: the text has half of a surrogate pair, which is no character; write both halves, or neither")
            prompts.append(given["text"])
        elif isinstance(tokens, list) and all(type(token) is int for token in tokens):
            prompts.append(tokens)
        else:
            raise ValueError(f'{path}, line {number}: expected {{"text": "..."}} or {{"tokens": [1, 2, ...]}}')
    return prompts


def encode(path: Path, prompts: Sequence[str | list[int]], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Texts as tokens.

    Raises:
        ValueError: a text, and no tokenizer.
    """
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f'{path}: "text" needs a tokenizer.json in the checkpoint folder; give "tokens" instead')
    return [tokenizer.encode(prompt).ids if tokenizer is not None and isinstance(prompt, str) else list(prompt) for prompt in prompts]  # type: ignore[arg-type]


def check(prompts: Sequence[Sequence[int]], *, vocab: int, longest: int, max_new_tokens: int, where: str) -> None:
    """Refuse prompts no engine can take, or that would be answered by another model than the one given.

    Raises:
        ValueError: names the prompt, the token and what would work.
    """
    if not prompts:
        raise ValueError(f"{where}: no prompts; give at least one")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"{where}: prompt {number} is empty; give at least one token")
        outside = [token for token in prompt if not 0 <= token < vocab]
        if outside:
            raise ValueError(f"{where}: prompt {number} has token {outside[0]}, outside the vocabulary of {vocab} (0 to {vocab - 1})")
        if len(prompt) + max_new_tokens > longest:
            raise ValueError(
                f"{where}: prompt {number} has {len(prompt)} tokens and {max_new_tokens} are to be sampled, the model takes {longest} in all;"
                f" shorten it to {max(0, longest - max_new_tokens)} or lower --max-new-tokens"
            )

"""The file that says what to compare::

model: ~/Qwen3-tiny              # HF folder
tokens: tokens.jsonl             # or {random: 8, longest: 96, seed: 1}
trainers: [megatron tp1, megatron tp2+ep2, stock megatron tp2+ep2]
rollouts: [vllm tp1, vllm tp2+ep, stock vllm tp1, hf float32]
contract: default                # as TIO_CONTRACT; the smallest that serves all layouts if left out
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import Contract, Layout
from tio_megatron.contract.environment import read
from tio_megatron.contract.words import RolloutLayout, TrainerLayout
from tio_megatron.files.strict_yaml import read_yaml
from tio_megatron.findings.messages import cut, named, shown
from tio_megatron.verify.readers import read_tokens

ENGINES = ("megatron", "vllm", "hf")
DTYPES = ("bfloat16", "float32")
MOST_BYTES = 1 << 20
FIELDS = {"model", "tokens", "trainers", "rollouts", "contract", "limit"}
_RANDOM = {"random": 8, "longest": 96, "seed": 1}


@dataclass(frozen=True)
class Side:
    """One engine in one layout, under the contract or ``stock``.

    >>> str(Side.parse("stock megatron tp2+ep2")), Side.parse("vllm tp2+ep").ranks
    ('stock megatron tp2+ep2', 1)
    """

    engine: str
    words: str
    stock: bool = False

    @classmethod
    def parse(cls, text: str) -> Side:
        """From ``[stock] megatron LAYOUT``, ``[stock] vllm LAYOUT`` or ``hf [dtype]``.

        Raises:
            ValueError: another engine, a layout that cannot be read, or one that the engine cannot have.
        """
        stock, _, rest = text.strip().partition(" ") if text.strip().startswith("stock ") else ("", "", text.strip())
        engine, _, words = rest.strip().partition(" ")
        words = words.strip().replace(" ", "+")
        if engine not in ENGINES:
            raise ValueError(f"side {shown(text)}: {shown(engine)} is none of {', '.join(ENGINES)}; example: stock megatron tp2+ep2")
        if engine == "hf":
            if words and words not in DTYPES:
                raise ValueError(f"side {shown(text)}: {shown(words)} is none of {', '.join(DTYPES)}")
            return cls(engine, words)
        words = words or "tp1"
        made = cls(engine, words, bool(stock))
        layout = made.layout
        if made.stock and layout is not None and (layout.pp > 1 or layout.cp > 1):
            raise ValueError(f"side {shown(text)}: stock Megatron is scored without pipeline stages and context parallelism; pp1 and cp1 would work")
        return made

    @property
    def layout(self) -> Layout | None:
        """In the contract's terms; None for a model of transformers."""
        if self.engine == "hf":
            return None
        return TrainerLayout.parse(self.words).layout if self.engine == "megatron" else RolloutLayout.parse(self.words).layout

    @property
    def ranks(self) -> int:
        """Processes to start: Megatron's ranks; the others start their own."""
        return TrainerLayout.parse(self.words).ranks if self.engine == "megatron" else 1

    def __str__(self) -> str:
        return " ".join(word for word in ("stock" if self.stock else "", self.engine, self.words) if word)


@dataclass(frozen=True)
class Table:
    """What to compare; everything checked."""

    model: Path
    tokens: list[list[int]]
    trainers: tuple[Side, ...]
    rollouts: tuple[Side, ...]
    contract: Contract

    @property
    def sides(self) -> tuple[Side, ...]:
        """Each side once."""
        return tuple(dict.fromkeys((*self.trainers, *self.rollouts)))

    @classmethod
    def from_file(cls, path: Path) -> Table:
        """Read a table.

        Raises:
            ValueError: no such file, no YAML, an unknown or missing field, a model or layout that does not fit; says which.
        """
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes, a table has at most {MOST_BYTES}")
            data = read_yaml(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, OverflowError, AttributeError, RecursionError, OSError) as error:
            # PyYAML lets Python's own errors of odd scalars through.
            raise ValueError(f"{path}: cannot be read as YAML ({cut(str(error))})") from error
        if not isinstance(data, Mapping):
            raise ValueError(f"{path}: expected a mapping with {', '.join(sorted(FIELDS))}, got {type(data).__name__}")
        unknown, missing = sorted(set(map(str, data)) - FIELDS), [name for name in ("model", "trainers", "rollouts") if not data.get(name)]
        if unknown or missing:
            said = [f"unknown {named(unknown)}" if unknown else "", f"missing {', '.join(missing)}" if missing else ""]
            raise ValueError(f"{path}: {'; '.join(filter(None, said))}; fields are {', '.join(sorted(FIELDS))}")
        model = (path.parent / Path(str(data["model"])).expanduser()).resolve()
        config = CheckpointConfig.from_file(model / "config.json")
        trainers, rollouts = (_sides(path, name, data[name]) for name in ("trainers", "rollouts"))
        plugged = [side.layout for side in (*trainers, *rollouts) if side.layout is not None and not side.stock]
        contract = read(data["contract"]).contract if data.get("contract") is not None else Contract.for_layouts(*(plugged or [Layout()]))
        for layout in plugged:
            try:
                contract.check(layout, config.shape)
            except ValueError as error:
                raise ValueError(f"{path}: {cut(str(error), 1000)}") from None
        return cls(model, _tokens(path, data.get("tokens", {}), config, data.get("limit", 16)), trainers, rollouts, contract)


def _sides(path: Path, name: str, given: Any) -> tuple[Side, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"{path}: {name} must be a list of words such as [megatron tp2+ep2, stock vllm tp1]")
    try:
        return tuple(dict.fromkeys(map(Side.parse, given)))
    except ValueError as error:
        raise ValueError(f"{path}: {name}: {error}") from error


def _tokens(path: Path, given: Any, config: CheckpointConfig, limit: Any) -> list[list[int]]:
    if type(limit) is not int or limit < 1:
        raise ValueError(f"{path}: limit must be a whole number of at least 1, got {shown(limit)}")
    if isinstance(given, str):
        tokens = read_tokens(path.parent / Path(given).expanduser())[:limit]
    elif isinstance(given, Mapping) and set(given) <= set(_RANDOM) and all(type(value) is int and value >= 1 for value in given.values()):
        chosen = _RANDOM | dict(given)
        draw = random.Random(chosen["seed"])
        lengths = [draw.randint(2, max(2, chosen["longest"])) for _ in range(min(chosen["random"], limit))]
        tokens = [[draw.randrange(config.shape.vocab) for _ in range(length)] for length in lengths]
    else:
        raise ValueError(f"{path}: tokens must be a file of JSON lines, or whole numbers under {', '.join(_RANDOM)}; got {shown(given)}")
    for number, sequence in enumerate(tokens):
        if not 2 <= len(sequence) <= config.max_positions or not all(0 <= token < config.shape.vocab for token in sequence):
            raise ValueError(f"{path}: sequence {number} must have 2 to {config.max_positions} tokens below the vocabulary of {config.shape.vocab}")
    if not tokens:
        raise ValueError(f"{path}: no tokens to score")
    return tokens

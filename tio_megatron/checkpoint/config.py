"""What an HF ``config.json`` says, checked: only models the contract covers get through."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tio_megatron.checkpoint.fields import wrong_types
from tio_megatron.contract import ModelShape
from tio_megatron.contract.model import MAX_POSITIONS
from tio_megatron.files.strict_json import GivenTwice, read_json
from tio_megatron.findings.messages import cut, shown
from tio_megatron.models import architecture_of, shape_from_hf

DTYPES = ("bfloat16", "float32")
"""Dtypes of weights the kernels take."""

NAMES_CODE = "auto_map names Python code of the folder, which is never run here (trust_remote_code is off); remove the field to use the stock classes"
_MAY_NAME_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "generation_config.json")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: says which file, what is wrong and what would work."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The parts of ``config.json`` that change a byte, and the raw contents for writing it back.

    ``normalise`` says whether the chosen experts' probabilities are made to sum to one.
    """

    shape: ModelShape
    dtype: str
    rms_eps: float
    rope_theta: float
    max_positions: int
    normalise: bool = True
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_file(cls, path: Path | str) -> CheckpointConfig:
        """From ``config.json`` of a checkpoint folder.

        Raises:
            CheckpointError: no such file, not JSON, or contents that :meth:`from_dict` refuses.
        """
        path = Path(path)
        if path.is_fifo() or path.is_socket() or path.is_char_device():  # reading would wait, perhaps for ever
            raise CheckpointError(f"{path}: no file but a pipe, a socket or a device")
        try:
            data = read_json(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file; a checkpoint is an HF folder with config.json and *.safetensors") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({cut(str(error))})") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
        require_no_code(path.parent)
        try:
            return cls.from_dict(data)
        except CheckpointError as error:
            raise CheckpointError(f"{path.parent}: {error}") from error

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> CheckpointConfig:
        """From the contents of ``config.json``.

        Raises:
            CheckpointError: names every field that is missing or that asks for something not covered.
        """
        try:
            shape = shape_from_hf(config)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if problems := wrong_types(config):
            raise CheckpointError("config.json: " + "; ".join(problems))
        problems = _not_covered(config, shape)
        rope_theta = _rope_theta(config, problems)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if dtype not in DTYPES:
            problems.append(f"dtype is {shown(dtype or None)}, supported are {list(DTYPES)}")
        if not _positive(epsilon := config.get("rms_norm_eps")):
            problems.append(f"rms_norm_eps is {shown(epsilon)}, it must be a positive number")
        positions = config.get("max_position_embeddings")
        if type(positions) is not int or not 1 <= positions <= MAX_POSITIONS:
            problems.append(f"max_position_embeddings is {_shown(positions)}, it must be a whole number from 1 to {MAX_POSITIONS}")
        if problems:
            raise CheckpointError("config.json: " + "; ".join(problems))
        return cls(
            shape=shape,
            dtype=dtype,
            rms_eps=float(config["rms_norm_eps"]),
            rope_theta=rope_theta,
            max_positions=config["max_position_embeddings"],
            normalise=bool(config.get(architecture_of(shape).normalise, False)),  # absent means False, as in HF's own config class
            raw=dict(config),
        )


def require_no_code(folder: Path) -> None:
    """Refuse a folder whose files name Python code of its own for transformers or vLLM to run (``auto_map``). Files that are not there, or are no
    JSON, are somebody else's to refuse.

    Raises:
        CheckpointError: names the file.
    """
    for name in _MAY_NAME_CODE:
        try:
            held = read_json((folder / name).read_text(encoding="utf-8"))
        except GivenTwice as error:  # another reader could take the other one
            raise CheckpointError(f"{folder / name}: {error}; take the model's own file") from error
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(held, dict) and held.get("auto_map"):
            raise CheckpointError(f"{folder / name}: {NAMES_CODE}")


def _not_covered(config: Mapping[str, Any], shape: ModelShape) -> list[str]:
    """What the contract does not cover, or would silently compute another way."""
    problems = []
    described = architecture_of(shape)
    wanted = [("hidden_act", "silu", None), ("model_type", described.model_type, described.model_type), *described.supported]
    wanted += [("attention_dropout", 0, 0), ("hidden_dropout", 0, 0)]
    for name, value, default in wanted:
        got = config.get(name, default)
        if got != value and not (got is None and default is not None):
            problems.append(f"{name} is {shown(got)}, supported is {value!r}")
    if config.get("auto_map"):
        problems.append(NAMES_CODE)
    if config.get("quantization_config"):
        problems.append("quantization_config is set, quantized weights are not supported (use the bf16 checkpoint)")
    kinds = config.get("layer_types") or []
    if others := sorted(set(kinds) - {"full_attention"}):
        problems.append(f"layer_types has {shown(others)}, supported is 'full_attention'")
    elif kinds and len(kinds) != shape.layers:
        problems.append(f"layer_types has {len(kinds)} entries, num_hidden_layers is {shape.layers}")
    if shape.head_dim % 2:
        problems.append(f"head_dim is {shape.head_dim}, rotary positions need an even one")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < shape.vocab:
                problems.append(f"{name} {shown(token)} is outside the vocabulary of {shape.vocab}")
    return problems


def _rope_theta(config: Mapping[str, Any], problems: list[str]) -> float:
    """The rotary base from either spelling (``rope_theta``, or ``rope_parameters`` of newer writers)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        problems.append(f"rope scaling {shown(kind)} is not supported, only 'default'")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append("partial_rotary_factor is not 1, partial rotary positions are not supported")
    theta: Any = parameters.get("rope_theta", config.get("rope_theta"))
    if not _positive(theta) or theta <= 1:
        problems.append(f"rope_theta is {_shown(theta)}, it must be a finite number above 1")
        return 0.0
    return float(theta)


def _positive(value: object) -> bool:
    """Whether it is a finite number above zero that fp64 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _shown(value: object) -> str:
    """The value for a message; of a number with hundreds of digits their count (Python refuses to print some)."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of about {int(value.bit_length() * 0.30103)} digits"
    return shown(value)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")

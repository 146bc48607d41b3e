"""One batch of rollouts: sequences end to end in flat arrays, and where they come from.

Legend: ``B`` sequences, ``T`` their tokens together, ``R`` their response tokens together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import shown
from tio_megatron.rollouts.errors import StoreError

Plain: TypeAlias = str | int | float | bool | None

ARRAYS: dict[str, type[np.generic]] = {
    "lengths": np.int64,
    "prompts": np.int64,
    "tokens": np.int32,
    "logprobs": np.float32,
    "seeds": np.int64,
    "rewards": np.float64,
    "groups": np.int64,
}
"""Arrays of a batch and their types, in the order in which they are hashed."""
OPTIONAL = ("logprobs", "seeds", "rewards", "groups")


@dataclass(frozen=True)
class About:
    """Where a batch comes from. An empty string is "not known", as for what was imported.

    Args:
        contract: fingerprint of the contract under which it was sampled.
        kernels: family and version of the kernels.
        weights: digest of the weights that sampled (:func:`tio_megatron.checkpoint.manifest_digest`).
        step: of the training, from 1 on; None where there is none.
        temperature: by which the logits were divided before ``logprobs`` were taken.
        source: in words: the engine and its layout, or the file that was imported.
        extra: whatever else, plain values by name.
    """

    contract: str = ""
    kernels: str = ""
    weights: str = ""
    step: int | None = None
    temperature: float = 1.0
    source: str = ""
    extra: Mapping[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("contract", "kernels", "weights", "source"):
            if not isinstance(getattr(self, name), str):
                raise StoreError(f"about: {name} must be text, got {shown(getattr(self, name))}")
        if self.step is not None and (isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0):
            raise StoreError(f"about: step must be a whole number from 0 on or None, got {shown(self.step)}")
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, int | float) or not 0 < self.temperature < math.inf:
            raise StoreError(f"about: temperature must be above 0 and finite, got {shown(self.temperature)}")
        if not isinstance(self.extra, Mapping):
            raise StoreError(f"about: extra must be plain values by name, got {shown(self.extra)}")
        for name, value in self.extra.items():
            plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
            if not isinstance(name, str) or not plain:
                raise StoreError(f"about: extra[{shown(name)}] must be text, a finite number, true, false or null, got {shown(value)}")

    def to_json(self) -> str:
        """One line, the same for equal contents."""
        return json.dumps({**vars(self), "extra": dict(self.extra)}, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> About:
        """What :meth:`to_json` wrote.

        Raises:
            StoreError: something else.
        """
        try:
            held = read_json(text)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where}: 'about' is no JSON ({error})") from None
        names = {each.name for each in fields(cls)}
        if not isinstance(held, dict) or held.keys() != names:
            raise StoreError(f"{where}: 'about' must be an object of {', '.join(sorted(names))}")
        try:
            return cls(**held)
        except (StoreError, OverflowError) as error:
            raise StoreError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Batch:
    """``lengths`` [B] tokens of each sequence, ``prompts`` [B] how many of them are prompt (1 or more), ``tokens`` [T]; and, where they are known,
    ``logprobs`` [R] of the response tokens, ``seeds`` [B] of the sampling, ``rewards`` [B], ``groups`` [B] (the number of the prompt).

    Types: :data:`ARRAYS`. Log-probabilities are those of the distribution that was sampled from, after the temperature.
    """

    about: About
    lengths: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None = None
    seeds: npt.NDArray[np.int64] | None = None
    rewards: npt.NDArray[np.float64] | None = None
    groups: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for name, dtype in ARRAYS.items():
            array = getattr(self, name)
            if array is None and name in OPTIONAL:
                continue
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise StoreError(f"batch: {name} must be {np.dtype(dtype)} with one axis, got {got}")
        if not len(self.lengths):
            raise StoreError("batch: no sequence in it")
        if len(self.prompts) != len(self.lengths) or (self.prompts < 1).any() or (self.prompts > self.lengths).any():
            raise StoreError("batch: every sequence needs a prompt of at least one token, no longer than itself")
        sizes = {"tokens": sum(self.lengths.tolist()), "logprobs": sum((self.lengths - self.prompts).tolist())}
        for name in ARRAYS:
            array = getattr(self, name)
            wanted = sizes.get(name, len(self.lengths))
            if array is not None and len(array) != wanted:
                raise StoreError(f"batch: {name} has {len(array)} entries, {wanted} were expected")
        if (self.tokens < 0).any():
            raise StoreError(f"batch: token {int(np.argmax(self.tokens < 0))} is {int(self.tokens.min())}, no token id")
        for name in ("logprobs", "rewards"):
            array = getattr(self, name)
            if array is not None and not np.isfinite(array).all():
                at = int(np.argmin(np.isfinite(array)))
                raise StoreError(f"batch: {name}[{at}] is {array[at]}; a finite number was expected")
        if self.logprobs is not None and (self.logprobs > 0).any():
            raise StoreError(f"batch: logprobs[{int(np.argmax(self.logprobs > 0))}] is above 0, no logarithm of a probability")

    @classmethod
    def of(
        cls,
        about: About,
        sequences: Sequence[Sequence[int]],
        prompts: Sequence[int],
        logprobs: Sequence[Sequence[float]] | None = None,
        *,
        seeds: Sequence[int] | None = None,
        rewards: Sequence[float] | None = None,
        groups: Sequence[int] | None = None,
    ) -> Batch:
        """From one list per sequence; ``logprobs`` has those of its response tokens.

        Raises:
            StoreError: the lists do not fit together, or a number is none that a batch may hold.
        """
        if logprobs is not None:
            wrong = [i for i, (ids, prompt, row) in enumerate(zip(sequences, prompts, logprobs, strict=True)) if len(ids) - prompt != len(row)]
            if wrong:
                i = wrong[0]
                raise StoreError(f"batch: sequence {i} has {len(sequences[i]) - prompts[i]} response tokens and {len(logprobs[i])} log-probabilities")

        def flat(name: str, values: Any) -> Any:
            dtype = ARRAYS[name]
            try:
                return None if values is None else np.array(list(values), dtype=dtype)
            except (OverflowError, ValueError, TypeError) as error:
                raise StoreError(f"batch: {name} do not fit {np.dtype(dtype)} ({error})") from None

        return cls(
            about,
            flat("lengths", map(len, sequences)),
            flat("prompts", prompts),
            flat("tokens", (token for ids in sequences for token in ids)),
            None if logprobs is None else flat("logprobs", (value for row in logprobs for value in row)),
            flat("seeds", seeds),
            flat("rewards", rewards),
            flat("groups", groups),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sequences(self) -> list[list[int]]:
        """The tokens, one list per sequence, prompt first."""
        return [part.tolist() for part in np.split(self.tokens, np.cumsum(self.lengths)[:-1])]

    @property
    def responses(self) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of the response tokens, one array per sequence.

        Raises:
            StoreError: it has none.
        """
        if self.logprobs is None:
            raise StoreError(f"batch ({self.about.source or 'of unknown source'}): it holds no log-probabilities; score it before it is compared")
        return np.split(self.logprobs, np.cumsum(self.lengths - self.prompts)[:-1])

    def select(self, places: Sequence[int]) -> Batch:
        """The sequences at ``places``, in that order, as a batch of the same origin."""
        starts, scored = np.cumsum(self.lengths) - self.lengths, np.cumsum(self.lengths - self.prompts) - (self.lengths - self.prompts)
        at = np.array(places, dtype=np.int64)

        def runs(array: Any, first: npt.NDArray[np.int64], count: npt.NDArray[np.int64]) -> Any:
            if array is None:
                return None
            return np.concatenate([array[first[i] : first[i] + count[i]] for i in places]) if len(at) else array[:0]

        def rows(array: Any) -> Any:
            return None if array is None else array[at]

        tokens, logprobs = runs(self.tokens, starts, self.lengths), runs(self.logprobs, scored, self.lengths - self.prompts)
        return Batch(self.about, self.lengths[at], self.prompts[at], tokens, logprobs, rows(self.seeds), rows(self.rewards), rows(self.groups))

    def same(self, other: Batch) -> str:
        """Empty if all arrays have the same bytes, else the name of the first that has not; :attr:`about` is not compared."""
        for name in ARRAYS:
            a, b = getattr(self, name), getattr(other, name)
            if (a is None) != (b is None) or (a is not None and a.tobytes() != b.tobytes()):
                return name
        return ""

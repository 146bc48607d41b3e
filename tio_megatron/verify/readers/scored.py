"""One sequence of a recording, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

LOGPROB_FIELDS = ("logprobs", "log_probs", "token_logprobs", "rollout_log_probs", "old_log_probs", "ref_log_prob", "prompt_logprobs")
"""Names under which log-probabilities are known, ours and verl's."""

TOKEN_FIELDS = ("tokens", "token_ids", "input_ids", "responses", "response_ids")
"""Names of the token ids that log-probabilities belong to. With ``prompts`` or ``prompt_ids`` beside them, verl's ``responses`` follow those."""

_SLACK = 1e-3
"""What rounding may put a log-probability above 0."""


@dataclass(frozen=True)
class Scored:
    """``tokens`` [n] int64 and ``logprobs`` [m] fp32 of its last ``m`` tokens (``m <= n``); ``where`` names it in messages."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    where: str

    def __post_init__(self) -> None:
        n, m = len(self.tokens), len(self.logprobs)
        if m > n:
            raise ValueError(f"{self.where}: {m} log-probabilities for {n} tokens")
        if n and int(self.tokens.min()) < 0:
            raise ValueError(f"{self.where}: token {int(np.argmin(self.tokens))} is {int(self.tokens.min())}, no token id")
        wrong = ~np.isfinite(self.logprobs) | (self.logprobs > _SLACK)
        if wrong.any():
            at = int(np.argmax(wrong))
            count = f" ({int(wrong.sum())} such tokens in this sequence)" if wrong.sum() > 1 else ""
            what = "no logarithm of a probability"
            if self.logprobs[at] == -np.inf:
                what = "the logarithm of 0: top-k, top-p or min-p left the token out; record log-probabilities before they filter"
            raise ValueError(f"{self.where}: the log-probability of token {n - m + at} is {self.logprobs[at]}{count}; {what}")

    @property
    def first(self) -> int:
        """Position of the first token that has a log-probability."""
        return len(self.tokens) - len(self.logprobs)


def require_no_padding(tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], where: str) -> None:
    """Refuse a row without a mask that ends as a padded row does: with one token id and one log-probability, over and over.

    Padding holds the same bytes on both sides; counted as tokens it would make two recordings more equal than they are.

    Raises:
        ValueError: says how many entries look like padding, and how to say which are.
    """
    count = min(len(tokens), len(logprobs))
    if count < 2:
        return
    ids, values = tokens[len(tokens) - count :], np.ascontiguousarray(logprobs[len(logprobs) - count :]).view(np.uint32)
    others = np.flatnonzero((ids != ids[-1]) | (values != values[-1]))
    padded = count - 1 - int(others[-1]) if len(others) else count
    if padded > 1:
        raise ValueError(
            f"{where}: the last {padded} tokens are all {ids[-1]} with the log-probability {logprobs[-1]}, as padding is, and nothing says which tokens count; "
            "write 'mask' or 'lengths' beside them"
        )


def require_file(path: Path) -> None:
    """Refuse what is no file.

    Raises:
        ValueError: says what it is.
    """
    if not path.is_file():
        raise ValueError(f"{path}: " + ("a folder, not a file" if path.is_dir() else "no file but a device or a pipe" if path.exists() else "no such file"))

"""A few lines for a training loop::

    monitor = Monitor("out/monitor", stop_above=0.0, configuration={"trainer": "tp2+ep2", "rollout": "tp4"})
    ...
    monitor.step(step, tokens=responses, trainer=old_log_probs, rollout=rollout_log_probs, mask=response_mask)

On one rank (the one that holds the batch): writes ``metrics.jsonl`` and a TensorBoard file, and on a breach a bundle (:mod:`.bundle`).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tio_megatron.verify.logdiff import logdiff
from tio_megatron.verify.monitor.bundle import write_bundle
from tio_megatron.verify.monitor.event_file import EventFile
from tio_megatron.verify.monitor.lines import append_line
from tio_megatron.verify.monitor.sides import Side, pair
from tio_megatron.verify.readers.scored import Scored

Numbers = dict[str, float | int]
_LONGEST_LINE = 1 << 16


class LogdiffWarning(UserWarning):
    """A step's logdiff is above ``warn_above``."""


class LogdiffError(RuntimeError):
    """A step's logdiff is above ``stop_above``; the bundle has been written."""


class Monitor:
    """Logdiff of every step of one run.

    Args:
        folder: for ``metrics.jsonl``, the event file and bundles; made. A run that goes on appends to what is there.
        warn_above: largest |logdiff| of a step without a :class:`LogdiffWarning`; None never warns.
        stop_above: largest |logdiff| without a :class:`LogdiffError`; None never stops.
        configuration: plain data about the run for bundles (layouts, dtype, contract fingerprint, weight digest); private parts are left out.
        most_bundles: breaches of which a bundle is kept.

    Raises:
        ValueError: a threshold that is no number of at least 0.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        warn_above: float | None = 0.0,
        stop_above: float | None = None,
        configuration: Mapping[str, Any] | None = None,
        most_bundles: int = 3,
    ) -> None:
        for name, value in (("warn_above", warn_above), ("stop_above", stop_above)):
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"monitor: {name} must be None or a finite number of at least 0, got {value!r}")
        self.folder = Path(folder)
        self.warn_above, self.stop_above = warn_above, stop_above
        self._configuration = dict(configuration or {})
        self._most_bundles = most_bundles
        self._events = EventFile(self.folder)

    def step(self, step: int, *, tokens: Any, trainer: Any, rollout: Any, mask: Any = None, **more: Any) -> Numbers:
        """Compare a step's log-probabilities, write the numbers, and act on a breach.

        Args:
            step: number of the step.
            tokens: ids of the scored tokens (responses), [B, n] or B lists.
            trainer: the trainer's log-probabilities of them, fp32, before any update of this step's weights.
            rollout: the rollout's.
            mask: which tokens count.
            more: further numbers of the step (reward, loss), written beside: plain ones, or tensors and arrays of one element.

        Returns:
            What was written: ``logdiff_max``, ``logdiff_mean``, ``logdiff_nonzero``, ``kl_k1``, ``kl_k3``, ``ratio_min``, ``ratio_max``, ``tokens``,
            ``nonfinite`` (tokens with a NaN or infinite log-probability on a side, counted in nothing else), and ``more``.

        Raises:
            ValueError: shapes or types that do not fit, or one of ``more`` that is no number or named like one of the monitor's.
            LogdiffError: above ``stop_above``, or not finite; a bundle has been written.
            OSError: the folder cannot be written.
        """
        further = {name: _number(name, value) for name, value in more.items()}
        step = int(step)
        sides = pair(tokens, trainer, rollout, mask)
        found = _numbers(sides)
        if taken := sorted(found.keys() & further):
            raise ValueError(f"monitor: {', '.join(taken)} is a number of the monitor's own; give it another name")
        numbers: Numbers = {**found, **further}
        line = {"step": step, **{name: _plain(value) for name, value in numbers.items()}}
        append_line(self.folder / "metrics.jsonl", json.dumps(line, allow_nan=False).encode() + b"\n")
        self._events.add(step, {f"tio/{name}": float(value) for name, value in numbers.items()})
        largest = math.inf if found["nonfinite"] else found["logdiff_max"]
        stops = self.stop_above is not None and largest > self.stop_above
        if not stops and (self.warn_above is None or largest <= self.warn_above):
            return numbers
        reason = f"{found['nonfinite']} log-probabilities are not finite" if found["nonfinite"] else f"max |logdiff| {found['logdiff_max']:.4g}"
        where = self._bundle(step, sides, numbers, reason)
        limit = self.stop_above if stops else self.warn_above
        said = f"step {step}: {reason}, above {limit:g} ({found['logdiff_nonzero']} of {found['tokens']} tokens differ){where}"
        if stops:
            raise LogdiffError(said)
        warnings.warn(said, LogdiffWarning, stacklevel=2)
        return numbers

    def last_step(self) -> int:
        """The last step that ``metrics.jsonl`` holds, 0 where there is none: a run that goes on counts from there.

        Raises:
            ValueError: the last line is not the monitor's.
        """
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
            lines = file.read().splitlines()
        if not lines:
            return 0
        try:
            return int(json.loads(lines[-1])["step"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"monitor: the last line of {path} holds no step of a monitor; move the file away, or name another folder") from None

    def verl(self, step: int, batch: Any, **more: Any) -> Numbers:
        """:meth:`step` of a verl ``DataProto`` that holds ``old_log_probs`` and ``rollout_log_probs`` (``actor_rollout_ref.rollout.calculate_log_probs``).

        Raises:
            ValueError: a tensor is missing; names it. Else as :meth:`step`.
        """
        held = batch.batch
        missing = [name for name in ("responses", "old_log_probs", "rollout_log_probs", "response_mask") if name not in held]
        if missing:
            raise ValueError(
                f"monitor: the batch has no {', '.join(missing)}; set actor_rollout_ref.rollout.calculate_log_probs=True and call it after compute_log_prob"
            )
        return self.step(step, tokens=held["responses"], trainer=held["old_log_probs"], rollout=held["rollout_log_probs"], mask=held["response_mask"], **more)

    def _bundle(self, step: int, sides: Sequence[Side], numbers: Numbers, reason: str) -> str:
        there = [path for path in self.folder.glob("breach-*") if path.is_dir()]
        if len(there) >= self._most_bundles:
            return f"; {len(there)} bundles are kept already in {self.folder}"
        statistics = {name: _plain(value) for name, value in numbers.items()}
        path = write_bundle(self.folder / f"breach-{step:08d}", sides, {"step": step, "reason": reason, "statistics": statistics}, self._configuration)
        return f"; look at it with: tio diagnose {path}"


def _numbers(sides: Sequence[Side]) -> Numbers:
    finite = [np.isfinite(side.trainer) & np.isfinite(side.rollout) for side in sides]
    nonfinite = sum(int((~one).sum()) for one in finite)
    left = [Scored(side.tokens[keep], side.trainer[keep], f"trainer, sequence {i}") for i, (side, keep) in enumerate(zip(sides, finite, strict=True))]
    right = [Scored(side.tokens[keep], side.rollout[keep], f"rollout, sequence {i}") for i, (side, keep) in enumerate(zip(sides, finite, strict=True))]
    found = logdiff(left, right)
    return {
        "logdiff_max": found.max_abs,
        "logdiff_mean": found.mean_abs,
        "logdiff_nonzero": found.nonzero,
        "kl_k1": found.k1,
        "kl_k3": found.k3,
        "ratio_min": found.ratio_min,
        "ratio_max": found.ratio_max,
        "tokens": found.tokens,
        "nonfinite": nonfinite,
    }


def _number(name: str, value: Any) -> float | int:
    """A number of ``more`` as a plain one: a mean in a training loop is a tensor, or numpy's."""
    shape = tuple(getattr(value, "shape", ()))
    if hasattr(value, "item") and math.prod(shape) == 1:
        value = value.item()
    if isinstance(value, int | float):
        return value
    what = f"{type(value).__name__} of shape {shape}" if shape else repr(value)[:60]
    raise ValueError(f"monitor: {name} is {what}, no number; one number a step would work, such as its mean")


def _plain(value: float | int) -> float | int | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value

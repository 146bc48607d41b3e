"""``VERL_USE_EXTERNAL_MODULES=tio_megatron.verify.monitor.verl`` puts the monitor into verl's trainer: no line of verl or of a recipe changes.

verl's trainer calls ``calculate_debug_metrics`` in every step in which it holds both sides' log-probabilities
(``actor_rollout_ref.rollout.calculate_log_probs=True``), and hands what it returns to its own loggers. The monitor is called there; its numbers go beside
verl's, as ``tio/...``. Tested with a stand-in of verl's function.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from tio_megatron.integrations import releases
from tio_megatron.integrations.patching import Patch, PatchSet
from tio_megatron.verify.monitor.monitor import Monitor

FOLDER = "TIO_MONITOR"
WARN = "TIO_MONITOR_WARN_ABOVE"
STOP = "TIO_MONITOR_STOP_ABOVE"
TARGET = "verl.utils.debug.metrics:calculate_debug_metrics"


def from_environment(environ: Mapping[str, str] | None = None) -> Monitor:
    """The monitor that the variables describe: a folder (``tio_monitor`` by default), and thresholds (warn above 0, never stop).

    Raises:
        ValueError: a threshold that is no number of at least 0.
    """
    values = os.environ if environ is None else environ
    return Monitor(values.get(FOLDER) or "tio_monitor", warn_above=_number(values, WARN, 0.0), stop_above=_number(values, STOP, None))


def _number(values: Mapping[str, str], name: str, default: float | None) -> float | None:
    text = values.get(name, "")
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no number; 0 tells of every bit") from None


def watched(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """``calculate_debug_metrics``: verl's numbers, and ours beside them. The monitor is made at the first step, in the one process that calls this."""
    made: list[Monitor] = []

    @functools.wraps(original)
    def calculate_debug_metrics(data: Any) -> dict[str, Any]:
        found = dict(original(data))
        if not made:
            made.append(from_environment())
        step = (getattr(data, "meta_info", None) or {}).get("global_steps")
        if step is None:  # verl 0.9's trainer gives none: one more than the last, of a run that goes on too
            step = made[0].last_step() + 1
        return found | {f"tio/{name}": value for name, value in made[0].verl(int(step), data).items()}

    return calculate_debug_metrics


patches = PatchSet(
    [Patch(TARGET, watched, why="verl's trainer calls it where it holds both sides, and logs what it returns", supported=releases.described("verl"))],
    on_import=True,
).on()
"""In force, or waiting for verl to import its module. ``patches.undo()`` takes it back."""

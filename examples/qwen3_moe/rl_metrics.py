"""What a step of reinforcement learning is measured by, and where the numbers go: JSON lines, TensorBoard, a picture, one last sentence."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tio_megatron import rl
from tio_megatron.files.strict_json import read_json
from tio_megatron.files.whole import write_whole
from tio_megatron.verify.monitor.event_file import EventFile
from tio_megatron.verify.monitor.lines import append_line

KINDS = (("with tio_megatron", "", "tab:green"), ("stock packages", "stock", "tab:orange"))
Metrics = dict[str, Any]
"""One step: names of numbers, in the order in which they are written."""


def measure(rollout: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]], entropies: Sequence[Sequence[float]], ratios: Sequence[Sequence[float]],
            rewards: Sequence[float]) -> Metrics:  # fmt: skip
    """The numbers of a step from its response tokens' log-probabilities on both sides, entropies and importance ratios. Means are exact sums.

    >>> found = measure([[-1.0, -2.0]], [[-1.0, -2.0]], [[0.5, 0.25]], [[1.0, 1.0]], [0.5])
    >>> found["logdiff_max"], found["kl_k1"], found["kl_k3"], found["ratio_min"], on_policy(found)
    (0.0, 0.0, 0.0, 1.0, True)
    >>> on_policy(measure([[-1.0, -2.0]], [[-1.0, -2.0000002]], [[0.5, 0.25]], [[1.0, 1.0]], [0.5]))
    False
    """
    sampled, scored, entropy, ratio = (torch.tensor([x for row in rows for x in row]) for rows in (rollout, trainer, entropies, ratios))
    logdiff = rl.Summary.of((scored - sampled).abs())
    span = rl.Summary.of(ratio)
    return {
        "reward": rl.Summary.of(torch.tensor(rewards)).mean,
        "entropy": rl.Summary.of(entropy).mean,
        "logdiff_max": logdiff.largest,
        "logdiff_mean": logdiff.mean,
        "logdiff_nonzero": logdiff.nonzero,
        "kl_k1": rl.Summary.of(rl.kl(sampled, scored, "k1")).mean,
        "kl_k3": rl.Summary.of(rl.kl(sampled, scored, "k3")).mean,
        "ratio_min": span.smallest,
        "ratio_max": span.largest,
        "tokens": logdiff.count,
    }


def on_policy(step: Mapping[str, Any]) -> bool:
    """Whether a step's log-probabilities agree to the last bit: every difference and divergence 0, every ratio 1."""
    zeros = all(step[name] == 0 for name in ("logdiff_max", "logdiff_mean", "logdiff_nonzero", "kl_k1", "kl_k3"))
    return zeros and step["ratio_min"] == step["ratio_max"] == 1.0


class MetricsFile:
    """``metrics.jsonl`` of a run and, beside it, an event file; each step is appended whole or not at all.

    Args:
        folder: of the run; older files in it are replaced.
        before: steps that an earlier part of the run has done.
    """

    def __init__(self, folder: Path, before: Sequence[Metrics] = ()) -> None:
        self.path = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        write_whole(self.path, b"".join(map(_line, before)))
        self._events = EventFile(folder)
        for step in before:
            self._record(step)

    def add(self, step: Metrics) -> None:
        """One line, and the same numbers for TensorBoard.

        Raises:
            OSError: it cannot be written; the file then ends with the line before.
        """
        append_line(self.path, _line(step))
        self._record(step)

    def _record(self, step: Metrics) -> None:
        self._events.add(step["step"], {name: float(value) for name, value in step.items() if isinstance(value, (int, float)) and name != "step"})


def _line(step: Metrics) -> bytes:
    """JSON has no NaN and no infinity: they become null."""
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in step.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def read(path: Path) -> list[Metrics]:
    """The steps of a ``metrics.jsonl``, with NaN for null; none if there is no such file.

    Raises:
        ValueError: the line that is none.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else [], 1):
        try:
            step = read_json(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error}); the run that wrote it would not have: remove the line, or the file") from error
        if not isinstance(step, dict) or any(not _fits(name, value) for name, value in step.items()):
            raise ValueError(f"{path}, line {number}: a JSON object of numbers was expected, with the digest of the weights as text")
        found.append({name: math.nan if value is None else value for name, value in step.items()})
    return found


def _fits(name: str, value: object) -> bool:
    return isinstance(value, str) if name == "weights" else value is None or isinstance(value, int | float)


def ends(steps: Sequence[Metrics], name: str = "reward", window: int = 5) -> tuple[float, float]:
    """The mean of a number over the first and over the last steps.

    >>> ends([{"reward": reward} for reward in (0.0, 0.5, 1.0)], window=2)
    (0.0, 1.0)
    """
    window = max(1, min(window, len(steps) // 2))
    first, last = steps[:window], steps[-window:]
    return sum(step[name] for step in first) / len(first), sum(step[name] for step in last) / len(last)


def sentence(steps: Sequence[Metrics], stock: bool) -> str:
    """The last line.

    >>> same = dict(reward=0.25, logdiff_max=0.0, logdiff_mean=0.0, logdiff_nonzero=0, kl_k1=0.0, kl_k3=0.0, ratio_min=1.0, ratio_max=1.0)
    >>> sentence([same, same | dict(reward=0.5)], False)
    'on policy in 2 of 2 steps (logdiff 0, ratio 1.0, KL 0); reward 0.25 to 0.50'
    """
    same = sum(map(on_policy, steps))
    logdiff, low, high = max(step["logdiff_max"] for step in steps), min(step["ratio_min"] for step in steps), max(step["ratio_max"] for step in steps)
    divergence = max(abs(step["kl_k3"]) for step in steps)
    found = "logdiff 0, ratio 1.0, KL 0" if same == len(steps) else f"logdiff to {logdiff:.3g}, ratio {low:.4g} to {high:.4g}, KL to {divergence:.2g}"
    before, after = ends(steps)
    return f"{'stock: ' if stock else ''}on policy in {same} of {len(steps)} steps ({found}); reward {before:.2f} to {after:.2f}"


def draw(folder: Path) -> Path:
    """``rl.png`` in ``folder`` from its ``metrics.jsonl`` and that in ``stock/`` below it, as far as they are there."""
    path = folder / "rl.png"
    write_whole(path, picture([read(folder / below / "metrics.jsonl") for _, below, _ in KINDS]))
    return path


def picture(runs: Sequence[Sequence[Metrics]]) -> bytes:
    """A PNG of three rows with a column for each kind of run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 2, figsize=(10, 8), sharex=True, sharey="row", layout="constrained")
    lengths = [len(run) for run in runs]
    for column, ((name, _, colour), run) in enumerate(zip(KINDS, runs, strict=True)):
        steps = [step["step"] for step in run]
        reward, divergence, ratio = axes[:, column]
        fewer = f", {len(run)} of {max(lengths)} steps" if 0 < len(run) < max(lengths) else ""
        reward.set_title(f"{name}{fewer}" if run else f"{name}: not run")
        reward.plot(steps, [step["reward"] for step in run], color=colour)
        divergence.plot(steps, [step["kl_k3"] for step in run], color=colour, label="k3")
        divergence.plot(steps, [abs(step["kl_k1"]) for step in run], color=colour, linestyle=":", label="|k1|")
        divergence.set_yscale("symlog", linthresh=1e-7)
        ratio.fill_between(steps, [step["ratio_min"] for step in run], [step["ratio_max"] for step in run], color=colour, alpha=0.4, linewidth=1)
        ratio.set_xlabel("step")
        if run:
            divergence.set_title(f"largest k3 {max(step['kl_k3'] for step in run):.2g}", fontsize="medium")
            low, high = min(step["ratio_min"] for step in run), max(step["ratio_max"] for step in run)
            ratio.set_title(f"from {low:.6g} to {high:.6g}", fontsize="medium")
            divergence.legend()
    for axis, label in zip(axes[:, 0], ("reward", "KL(rollout, trainer)", "importance ratio, smallest to largest"), strict=True):
        axis.set_ylabel(label)
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=120)
    pyplot.close(figure)
    return held.getvalue()

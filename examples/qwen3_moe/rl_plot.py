"""One picture of both kinds of run side by side: reward, KL and importance ratio over the steps, with tio_megatron and without."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.qwen3_moe.report import replace_file
from examples.qwen3_moe.rl_metrics import Metrics, read

KINDS = (("with tio_megatron", "", "tab:green"), ("stock packages", "stock", "tab:orange"))


def draw(folder: Path) -> Path:
    """``rl.png`` in ``folder`` from its ``metrics.jsonl`` and that in ``stock/`` below it, as far as they are there."""
    path = folder / "rl.png"
    replace_file(path, picture([read(folder / below / "metrics.jsonl") for _, below, _ in KINDS]))
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


if __name__ == "__main__":
    print(draw(Path(sys.argv[1] if len(sys.argv) > 1 else "out/rl")))

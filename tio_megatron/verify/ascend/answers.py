"""Answers of the self-check, and the report that is sent back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Holds = Literal["yes", "no", "not asked"]


@dataclass(frozen=True)
class Answer:
    """One question. ``needed``: the family stands on a yes; else it is only worth knowing."""

    question: str
    holds: Holds
    detail: str = ""
    needed: bool = True
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


class Different(Exception):
    """Bytes differ; the message says where first."""


def same(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Equal bytes.

    Raises:
        Different: names the first element that differs, with both values, and how many do.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise Different(f"{what}: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}")
    x, y = (t.detach().cpu().contiguous() for t in (a, b))
    wide = {2: torch.int16, 4: torch.int32}[x.element_size()]
    differs = (x.view(wide) != y.view(wide)).reshape(-1)
    count = int(differs.sum())
    if count:
        at = int(differs.nonzero()[0])
        place = [int(i) for i in torch.unravel_index(torch.tensor(at), x.shape)]
        gap = (x.double() - y.double()).abs().max().item()
        raise Different(
            f"{what}: {count} of {x.numel()} differ, first at {place}: {x.reshape(-1)[at].item()!r} and {y.reshape(-1)[at].item()!r}; at most {gap:.3g} apart"
        )


def ask(question: str, work: Callable[[], str | None], *, needed: bool = True) -> Answer:
    """Do the work; equal bytes are a yes. An operator that refuses or fails is a no with its words: the other questions are still asked."""
    start = time.perf_counter()
    try:
        detail = work() or ""
        holds: Holds = "yes"
    except Different as found:
        holds, detail = "no", str(found)
    except (RuntimeError, ValueError) as error:
        holds, detail = "no", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return Answer(question, holds, detail, needed, round(time.perf_counter() - start, 3))


def text(report: dict[str, Any]) -> str:
    """The report in lines."""
    lines = [report["label"], ""]
    lines += [f"{name}: {value}" for name, value in report["versions"].items()]
    switches = report["switches"]
    lines += [f"{name}={entry['value']}" for name, entry in switches["variables"].items()]
    lines += [f"deterministic level: {switches['level']}, torch: {switches['deterministic']}", ""]
    for title, answers in report["answers"].items():
        lines.append(title)
        lines += [_line(answer) for answer in answers]
        lines.append("")
    if report["table"]:
        lines.append("layouts (one block, log-probabilities; differ: tokens whose log-probability has other bytes)")
        lines.append(f"{'':8}{'trainer':18}{'rollout':18}{'tokens':>8}{'differ':>8}  max |logdiff|   ms")
        lines += [_row(row) for row in report["table"]]
        lines.append("")
    lines.append(report["verdict"])
    return "\n".join(lines) + "\n"


def _line(answer: dict[str, Any]) -> str:
    mark = answer["holds"] if answer["needed"] or answer["holds"] != "no" else "no (only worth knowing)"
    return f"  {mark:10} {answer['question']}" + (f"\n{'':13}{answer['detail']}" if answer["detail"] else "")


def _row(row: dict[str, Any]) -> str:
    head = f"{row['side']:8}{row['trainer']:18}{row['rollout']:18}"
    if row["problem"]:
        return f"{head}  {row['problem']}"
    return f"{head}{row['tokens']:>8}{row['differ']:>8}  {row['max_logdiff']:<13.4g} {row['ms']:>6.1f}"


def verdict(answers: Iterable[dict[str, Any]], table: Iterable[dict[str, Any]], twin: bool) -> tuple[int, str]:
    """Exit status and last line: 0 where everything needed holds."""
    wrong = [a["question"] for a in answers if a["needed"] and a["holds"] == "no"]
    rows = [row for row in table if row["side"] == "tio"]
    bad = [row for row in rows if row["problem"] or row["differ"]]
    where = "the CPU twins" if twin else "this device"
    if not wrong and not bad:
        return 0, f"everything that is needed holds on {where}: {len(rows)} of {len(rows)} pairs of layouts with logdiff 0"
    words = [f"{len(wrong)} of the answers are a no"] if wrong else []
    words += [f"{len(bad)} of {len(rows)} pairs of layouts are not at logdiff 0"] if bad else []
    return 1, f"on {where} {' and '.join(words)}; please send report.json"

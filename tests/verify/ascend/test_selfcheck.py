"""The self-check itself: its flow on the CPU twins, what it says without an NPU, and that wrong orders planted in the twins are found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support import ended_selfcheck
from tio_megatron import ascend_selfcheck
from tio_megatron.kernels import npu_family
from tio_megatron.kernels.npu import stand_in, twin
from tio_megatron.kernels.npu.twin_attention import Order, attend
from tio_megatron.verify.ascend import answers, facts, place, run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> place.Place:
    """Twins, and few short sequences."""
    monkeypatch.setattr(place.Place, "lengths", property(lambda self: (1, 40)))
    monkeypatch.setattr(facts, "PAGES", (128,))
    return place.take(0, True)


def no(asked: list[answers.Answer]) -> list[str]:
    return [answer.question for answer in asked if answer.holds == "no"]


def test_every_answer_of_the_twins_is_a_yes(here: place.Place) -> None:
    asked = [*facts.operators(here), *facts.levels(here, 1)]
    assert no(asked) == [] and len(asked) == 19
    assert answers.verdict([a.to_dict() for a in asked], [], True)[0] == 0


def other_order(wrong: Callable[[int, int], Order]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Attention in an order that depends on the numbers of queries and keys."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool = True, order: Order | None = None) -> tuple[torch.Tensor, ...]:
        return attend(q, k, v, scale, causal=causal, order=wrong(q.shape[0], k.shape[0]))

    return run


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda n, m: Order(block=8, splits=2) if n == 1 and m > 1 else Order(), "decode"),
        (lambda n, m: Order(block=16, grid=m - n) if n != m else Order(block=16), "chunks"),
        (lambda n, m: Order(visit_masked=True), "not seen"),
    ],
    ids=["a split when decoding", "blocks from the chunk's start", "masked keys that are read"],
)
def test_a_planted_order_is_found(here: place.Place, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[int, int], Order], found: str) -> None:
    monkeypatch.setattr(stand_in, "attend", other_order(wrong))
    asked = list(facts._attention(here, facts.Attention(here)))
    assert any(found in question for question in no(asked)), no(asked)
    assert any("differ, first at" in answer.detail for answer in asked if answer.holds == "no")
    assert answers.verdict([a.to_dict() for a in asked], [], True)[0] == 1


def test_products_and_norms_that_see_their_neighbours_are_found(here: place.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, fold = twin.matmul, twin.fold

    def halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return honest(x, w) if x.shape[0] < 3 else (honest(x[:, :half], w[:half]).float() + honest(x[:, half:], w[half:]).float()).to(x.dtype)

    monkeypatch.setattr(twin, "matmul", halves)
    monkeypatch.setattr(twin, "fold", lambda x: fold(x) if x.shape[0] > 2 else x.sum(-1))
    asked = list(facts._rows(here))
    assert {question.split(":")[0] for question in no(asked)} >= {"grouped product"}
    assert any("does not see" in question for question in no(asked))


def test_an_operator_that_fails_is_an_answer_and_the_rest_is_asked(here: place.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **given: object) -> None:
        raise RuntimeError("aclnn failed, 507899\nand a page of trace")

    monkeypatch.setattr(twin, "permute", broken)
    asked = list(facts._rows(here))
    assert [a.detail for a in asked if a.holds == "no"] == ["RuntimeError: aclnn failed, 507899"] and len(asked) == 6


@pytest.mark.full
def test_without_an_npu_it_says_so_and_ends_with_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tio_megatron.ascend_selfcheck", "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ascend_selfcheck: no NPU to ask: an NPU's kernels need torch_npu") and line.endswith("--twin asks the CPU twins")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_process_that_a_device_ends_leaves_a_report(tmp_path: Path) -> None:
    """What was answered until then is in it, and who ended."""
    with mock.patch.object(run, "_rank", ended_selfcheck.rank):
        report = run.check(tmp_path, devices=1, twin=True)
    assert report["status"] == 1 and report["table"] == []
    asked, ended = report["answers"]["one device"]
    assert asked["question"] == "asked before" and ended["question"] == "the processes came to their end"
    assert ended["detail"] == "RuntimeError: HCCL could not start (not answered: those to several, the layouts)"
    assert "HCCL could not start" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("devices", ["0", "5"])
def test_more_devices_than_there_are_are_refused(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ascend_selfcheck.main(["--twin", "--devices", devices]) == 2
    assert capsys.readouterr().err == f"ascend_selfcheck: --devices {devices}: 1 to 4 are here\n"


def test_a_missing_kernel_is_a_row_of_the_table_not_the_end() -> None:
    from tio_megatron.verify.ascend.table import _compare

    row = {"side": "tio", "trainer": "TP 1", "rollout": "TP 2"} | _compare((None, 0.0, "not available: linear"), (torch.zeros(2), 1.0, ""))
    assert row["problem"] == "not available: linear"
    assert answers.verdict([], [row], False) == (1, "on this device 1 of 1 pairs of layouts are not at logdiff 0; please send report.json")


@pytest.mark.full
def test_two_processes_answer_and_the_table_is_zero_where_stock_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tio_megatron.ascend_selfcheck", "--twin", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("tio_megatron self-check of Ascend NPUs: TWIN RUN ON A CPU. Not run on an NPU")
    report = json.loads((tmp_path / "report.json").read_text())
    ours = [row for row in report["table"] if row["side"] == "tio"]
    assert len(ours) == 9 and all(row["differ"] == 0 and row["tokens"] == 64 and not row["problem"] for row in ours)
    assert any(row["differ"] for row in report["table"] if row["side"] == "stock")
    assert report["switches"]["problems"] == [] and report["status"] == 0
    assert done.stdout.endswith("everything that is needed holds on the CPU twins: 9 of 9 pairs of layouts with logdiff 0\n")


@pytest.mark.full
def test_the_whole_flow_on_four_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tio_megatron.ascend_selfcheck", "--twin", "--devices", "4", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "25 of 25 pairs of layouts with logdiff 0" in done.stdout


def test_bad_input_is_one_line_and_2_before_any_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "check", lambda *args, **kwargs: pytest.fail("started"))
    file = tmp_path / "file"
    file.touch()
    assert ascend_selfcheck.main(["--twin", "--out", str(file)]) == 2
    said = capsys.readouterr().err
    assert str(file) in said and said.count("\n") == 1
    monkeypatch.setenv("TIO_NPU_ATTENTION", "foo")
    npu_family.route.cache_clear()
    try:
        assert ascend_selfcheck.main(["--twin", "--out", str(tmp_path / "out")]) == 2
    finally:
        npu_family.route.cache_clear()
    said = capsys.readouterr().err
    assert "TIO_NPU_ATTENTION='foo': the attention of an NPU is one of" in said and said.count("\n") == 1

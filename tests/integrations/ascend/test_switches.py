"""The switches of an NPU's libraries: set in time, refused when somebody set them against a fixed order, and reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tio_megatron.integrations import ascend
from tio_megatron.integrations.ascend import switches

ROOT = Path(__file__).resolve().parents[3]
RIGHT = {s.name: s.value for s in switches.SWITCHES}


def test_what_nobody_set_is_set() -> None:
    environ = {"HOME": "/"}
    assert switches.prepare(environ) == RIGHT and environ == RIGHT | {"HOME": "/"}
    assert switches.prepare(environ) == {}
    switches.verify(environ)


@pytest.mark.parametrize("name", RIGHT)
def test_each_is_missed(name: str) -> None:
    environ = {key: value for key, value in RIGHT.items() if key != name}
    with pytest.raises(switches.SwitchError, match=f"{name} is not set.*{name}={RIGHT[name]} works"):
        switches.verify(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HCCL_DETERMINISTIC", "false"),
        ("LCCL_DETERMINISTIC", "0"),
        ("CLOSE_MATMUL_K_SHIFT", "0"),
        ("ATB_MATMUL_SHUFFLE_K_ENABLE", "1"),
        ("ATB_LLM_LCOC_ENABLE", "1"),
    ],
)
def test_a_value_against_a_fixed_order_is_refused_not_overwritten(name: str, value: str) -> None:
    environ = {name: value}
    for check in (switches.prepare, switches.verify):
        with pytest.raises(switches.SwitchError, match=f"{name}={value}.*works"):
            check(environ)
    assert environ == {name: value}


def test_other_values_that_do_no_harm_stay() -> None:
    environ = RIGHT | {"HCCL_DETERMINISTIC": "true"}
    assert switches.prepare(environ) == {} and environ["HCCL_DETERMINISTIC"] == "true"
    assert switches.prepare(RIGHT | {"HCCL_DETERMINISTIC": "STRICT"}) == {}


def in_a_process(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in RIGHT}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=kept | environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)


def test_after_the_process_group_it_is_too_late() -> None:
    done = in_a_process("""
import os, torch.distributed as dist
from tio_megatron.integrations.ascend import switches
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for right in (False, True):
    if right:
        os.environ.update({s.name: s.value for s in switches.SWITCHES})
    try:
        print(switches.prepare(), switches.report()["group"])
    except switches.SwitchError as error:
        print(error)
""")
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first.startswith("the process group was made before HCCL_DETERMINISTIC") and "before torch.distributed.init_process_group" in first
    assert second == "{} True"


def test_the_family_wants_torch_npu_by_name_and_sets_the_switches_first() -> None:
    done = in_a_process("""
import os, tio_megatron as tio
try:
    tio.apply(tio.Contract(family="npu-910b"))
except ImportError as error:
    print(error)
print(os.environ["HCCL_DETERMINISTIC"], os.environ["CLOSE_MATMUL_K_SHIFT"])
""")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "an NPU's kernels need torch_npu (pip install torch_npu==2.13.0, and CANN: source set_env.sh); it is not installed",
        "strict 1",
    ]


def test_another_family_touches_no_switch() -> None:
    done = in_a_process("""
import os, tio_megatron as tio
with tio.apply(tio.Contract()):
    print("HCCL_DETERMINISTIC" in os.environ)
""")
    assert done.stdout.strip() == "False", done.stderr[-2000:]


def test_the_report_says_what_is_and_what_works() -> None:
    told = ascend.report({"LCCL_DETERMINISTIC": "0"} | {"HCCL_DETERMINISTIC": "strict"})
    assert told["variables"]["LCCL_DETERMINISTIC"] == {"value": "0", "works": ["1"], "about": "LCCL's own sums: the order of ranks"}
    assert told["level"] is None and len(told["problems"]) == 4
    assert ascend.report(RIGHT)["problems"] == []


@pytest.mark.parametrize("level", [0, 4])
def test_levels_that_promise_nothing_are_refused(level: int) -> None:
    with pytest.raises(ValueError, match=f"deterministic level {level}: 1, 2 or 3"):
        switches.set_level(level)


def test_a_level_that_this_process_cannot_have_is_refused_by_name() -> None:
    done = in_a_process("""
from tio_megatron.integrations.ascend import switches
import torch
switches.set_level()
print(torch.are_deterministic_algorithms_enabled())
try:
    switches.set_level(2)
except switches.SwitchError as error:
    print(error)
""")
    assert done.stdout.splitlines()[0] == "True" and "needs a torch_npu with set_deterministic_level" in done.stdout, done.stderr[-2000:]

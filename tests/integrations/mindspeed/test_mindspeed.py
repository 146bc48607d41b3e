"""Our patches under MindSpeed: the cases of ``mindspeed_cases.py``, against a stand-in of its patch manager and, with MINDSPEED=DIR, against the sources.

``make test-mindspeed`` sets MINDSPEED. Without it the tests of the real sources are skipped: nothing of MindSpeed is in CI.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import mindspeed_cases
import mindspeed_training
import pytest

from tio_megatron.contract import Layout
from tio_megatron.testing.qwen3 import MOE, write_tiny

SUPPORT = Path(mindspeed_cases.__file__).parent
ROOT = SUPPORT.parents[1]
CASES = [name.removeprefix("case_") for name in vars(mindspeed_cases) if name.startswith("case_")]
SOURCES = os.environ.get("MINDSPEED", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), MOE)


def results(folder, model, names):
    """``{name: (error, returned)}`` of cases run against the package ``mindspeed`` in ``folder``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "mindspeed_cases.py"), str(folder), str(model), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=590)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert {line[0] for line in lines} == set(names), done.stdout[-2000:] + done.stderr[-2000:]
    return {name: (error, returned) for name, error, returned in lines}


@pytest.fixture(scope="module")
def stand_in(model):
    # The table of options is compared with the real sources alone.
    return results(SUPPORT / "stand_ins", model, [name for name in CASES if name != "parser"])


@pytest.fixture(scope="module")
def real(model):
    if not SOURCES:
        pytest.skip("MINDSPEED is not set: make test-mindspeed MINDSPEED=DIR, with a checkout of MindSpeed core_r0.16.0")
    assert Path(SOURCES, "mindspeed", "patch_utils.py").is_file(), f"MINDSPEED={SOURCES}: no mindspeed/patch_utils.py there"
    return results(SOURCES, model, CASES)


@pytest.fixture(scope="module")
def alone(model):
    """The same training steps in processes without MindSpeed."""
    return {"model": mindspeed_training.digests(model), "context_parallel": mindspeed_training.digests(model, layout=Layout(cp=2))}


@pytest.mark.parametrize("name", [name for name in CASES if name != "parser"])
def test_stand_in(name, stand_in):
    error, _ = stand_in[name]
    assert error is None, error


@pytest.mark.parametrize("name", CASES)
def test_real_sources(name, real):
    error, _ = real[name]
    assert error is None, error


@pytest.mark.parametrize("name", ["model", "context_parallel"])
def test_training_has_the_bytes_of_a_process_without_mindspeed(name, stand_in, alone):
    assert stand_in[name][1] == alone[name]


@pytest.mark.parametrize("name", ["model", "context_parallel"])
def test_training_has_the_bytes_of_a_process_without_the_real_sources(name, real, alone):
    assert real[name][1] == alone[name]


def test_the_control_has_other_bytes(alone, model):
    stock = mindspeed_training.digests(model, ordered=False)
    assert stock["losses"] != alone["model"]["losses"] and stock["weights"] != alone["model"]["weights"]

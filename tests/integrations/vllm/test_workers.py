"""Workers of a real engine: what each says when asked, one in which the plug-in is off, and a model that another plug-in registered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tio_megatron.testing.qwen3 import MOE, write_tiny
from tio_megatron.verify.doctor import of_workers

ROOT = Path(__file__).resolve().parents[3]

START = """
import json, sys
from vllm import LLM
from tio_megatron.contract import Contract
from tio_megatron.integrations.vllm import engine_options
from tio_megatron.integrations.vllm.workers import all_workers
if __name__ == "__main__":
    folder, tp, worker = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    more = dict(dtype="bfloat16", skip_tokenizer_init=True, max_model_len=256, block_size=64, num_gpu_blocks_override=16)
    if worker == "environment":
        llm = LLM(model=folder, tensor_parallel_size=tp, enforce_eager=True, **more)
    else:
        options = engine_options(Contract(), tp=tp, **more)
        llm = LLM(model=folder, **options | ({"worker_cls": worker} if worker != "argument" else {}))
    try:
        print("ANSWER", json.dumps(all_workers(llm)))
    except ValueError as error:
        print("ANSWER", json.dumps(str(error)))
"""


def start(folder, tp, worker="argument", **environ):
    """(exit status, answer, everything printed) of a process that starts an engine."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    script = folder.parent / "start.py"
    script.write_text(START)
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(tp), worker], env={**environment, **environ}, capture_output=True, text=True, timeout=400
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return done.returncode, json.loads(answers[0][7:]) if answers else None, done.stdout + done.stderr


def bad(left):
    """What `tio doctor --workers` finds wrong."""
    return [finding for finding in of_workers(left).findings if finding.level == "bad"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("workers") / "moe", MOE)


@pytest.mark.full
@pytest.mark.parametrize("worker, environ", [("argument", {}), ("environment", {"TIO_CONTRACT": "1"})])
def test_every_worker_answers(folder, worker, environ, tmp_path):
    status, found, said = start(folder, 2, worker, TIO_HANDSHAKE=str(tmp_path), **environ)
    assert status == 0, said
    assert not bad(tmp_path) and "2 of 2 workers run contract" in of_workers(tmp_path, contract="1").findings[0].what
    assert [one["rank"] for one in found] == [0, 1] and len({one["pid"] for one in found}) == 2
    assert all(one["model"] == "TioQwen3MoeForCausalLM" and one["engine"].startswith("vllm 0.32") and not one["problems"] for one in found)
    assert len({one["contract"] for one in found}) == 1 and "vllm.v1.sample.sampler:Sampler.sample" in found[0]["symbols"]


@pytest.mark.full
def test_a_worker_without_the_plug_in_ends_the_start_and_is_named(folder, tmp_path):
    status, found, said = start(folder, 2, "off_worker.OffWorker", TIO_START_SECONDS="8", TIO_HANDSHAKE=str(tmp_path))
    assert status != 0 and found is None
    assert "rank 1: tio_megatron did not load there" in said, said[-3000:]
    (finding,) = bad(tmp_path)
    assert finding.what.startswith("vllm 0.32") and "no answer from rank 1 of 2" in finding.what


@pytest.mark.full
def test_a_real_worker_leaves_its_answer(folder, tmp_path):
    status, found, said = start(folder, 1, "environment", VLLM_ENABLE_V1_MULTIPROCESSING="0", TIO_CONTRACT="1", TIO_HANDSHAKE=str(tmp_path))
    assert status == 0 and len(found) == 1, said[-3000:]
    assert not bad(tmp_path) and "1 of 1 workers run contract" in of_workers(tmp_path, contract="1").findings[0].what


@pytest.mark.full
def test_an_engine_without_the_plug_in_says_so_when_asked(folder):
    status, found, said = start(folder, 1, "environment", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert status == 0 and "tio_megatron did not load in the workers of this engine" in found, said[-3000:]


def test_a_model_that_another_plug_in_registered_is_named():
    from tio_megatron.contract import Contract
    from tio_megatron.integrations.vllm import plugin, workers

    was = plugin.is_active()
    plugin.activate(Contract())
    try:
        foreign = type("Qwen3MoeForCausalLM", (), {"__module__": "other_plugin.models"})
        with pytest.raises(ValueError) as refused:
            workers.load_together(lambda loader, vllm_config, model_config: foreign())(None, None, None)
        assert "vLLM built other_plugin.models.Qwen3MoeForCausalLM in this worker" in str(refused.value) and "VLLM_PLUGINS" in str(refused.value)
    finally:
        if not was:
            plugin.deactivate()


def test_a_rollout_of_verl_names_a_trainer_without_us(monkeypatch):
    """vLLM finds its plug-in by itself, verl's trainer does not. In verl's own processes: tests/verl/test_workers.py."""
    from tio_megatron.integrations.vllm import workers

    monkeypatch.delitem(sys.modules, "verl", raising=False)
    monkeypatch.delitem(sys.modules, "tio_megatron.auto", raising=False)
    assert workers.trainer_without_us() == []
    monkeypatch.setitem(sys.modules, "verl", type(sys)("verl"))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my.module")
    (line,) = workers.trainer_without_us()
    assert "VERL_USE_EXTERNAL_MODULES='my.module'" in line and "VERL_USE_EXTERNAL_MODULES=tio_megatron.auto in the environment of every worker" in line
    monkeypatch.setitem(sys.modules, "tio_megatron.auto", type(sys)("tio_megatron.auto"))
    assert workers.trainer_without_us() == []


def test_a_worker_says_whether_it_obeys_a_trainers_contract():
    """How verl's trainer asks, whose servers return nothing. In verl's own processes: tests/verl/test_workers.py."""
    from tio_megatron.contract import Contract
    from tio_megatron.integrations.vllm import plugin, workers

    was = plugin.is_active()
    plugin.activate(Contract())
    try:
        mine = workers.this_worker()
        workers.tio_agree(None, mine)
        with pytest.raises(ValueError, match=r"rollout rank 0 .* / trainer rank 3 .*: contract: .* / none; kernels: .* / none; give both the same packages"):
            workers.tio_agree(None, mine | {"rank": 3, "contract": "none", "kernels": "none"})
    finally:
        if not was:
            plugin.deactivate()

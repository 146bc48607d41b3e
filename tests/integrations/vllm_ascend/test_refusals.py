"""What an engine on an NPU may not be asked for, by name; and how the platform is recognised."""

import importlib.machinery
import sys
import types
from types import SimpleNamespace

import pytest

from tio_megatron.integrations.vllm import options, platforms
from tio_megatron.integrations.vllm.ascend import refusals, seam


def engine(**fields):
    model = SimpleNamespace(enforce_eager=True, dtype="torch.bfloat16", logprobs_mode="raw_logprobs", enable_sleep_mode=False)
    found = SimpleNamespace(
        additional_config={"weight_nz_mode": 0},
        model_config=model,
        cache_config=SimpleNamespace(user_specified_block_size=True, block_size=128),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE")),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        weight_transfer_config=None,
    )
    for path, value in fields.items():
        owner, _, name = path.rpartition("__")
        setattr(getattr(found, owner) if owner else found, name, value)
    return found


def lines(environment=None, **fields):
    return list(map(str, refusals.problems(engine(**fields), environment or {})))


def test_what_engine_options_gives_is_taken():
    assert lines() == []
    assert lines(additional_config=seam.ADDITIONAL | {"enable_cpu_binding": False, "enable_flashcomm1": False, "eplb_config": {}}) == []


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"additional_config": {}}, "VLLM_ASCEND_ENABLE_NZ=None"),
        ({"additional_config": {"weight_nz_mode": 2}}, "additional_config['weight_nz_mode']=2"),
        ({"additional_config": {"weight_nz_mode": 0, "enable_matmul_allreduce": True}}, "enable_matmul_allreduce"),
        ({"additional_config": {"weight_nz_mode": 0, "enable_fused_mc2": 1}}, "enable_fused_mc2"),
        ({"additional_config": {"weight_nz_mode": 0, "finegrained_tp_config": {"oproj_tensor_parallel_size": 2}}}, "finegrained_tp_config"),
        ({"model_config__enforce_eager": False}, "enforce_eager=True"),
        ({"compilation_config__cudagraph_mode": SimpleNamespace(name="FULL_DECODE_ONLY")}, "graphs"),
        ({"model_config__dtype": "torch.float32"}, "bfloat16"),
        ({"cache_config__block_size": 64}, "block_size=64"),
        ({"model_config__logprobs_mode": "processed_logprobs"}, "raw_logprobs"),
        ({"weight_transfer_config": object()}, "tio_load"),
        ({"scheduler_config__async_scheduling": True}, "async_scheduling"),
        ({"model_config__enable_sleep_mode": True}, "enable_sleep_mode"),
    ],
)
def test_refused_by_name(fields, said):
    found = lines(**fields)
    assert any(said in line for line in found), found


def test_variables_are_refused_by_name():
    assert lines({"VLLM_ASCEND_ENABLE_NZ": "0"}, additional_config={}) == []
    (line,) = lines({"VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE": "1"})
    assert line.startswith("VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE='1':") and line.endswith("set VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE=0")


@pytest.fixture
def npu(monkeypatch):
    """As if vLLM had taken vllm-ascend's platform."""
    import vllm.platforms

    module = types.ModuleType("vllm_ascend")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm_ascend", None)
    monkeypatch.setitem(sys.modules, "vllm_ascend", module)
    monkeypatch.setattr(type(vllm.platforms.current_platform), "device_type", "npu")


def test_the_platform_is_recognised_and_its_worker_named(npu):
    assert platforms.is_ascend() and platforms.device() == "npu" and platforms.worker() == platforms.ASCEND_WORKER
    given = options.engine_options(tp=2, additional_config={"enable_cpu_binding": False})
    assert given["worker_cls"] == platforms.ASCEND_WORKER and "weight_transfer_config" not in given and given["block_size"] == 128
    assert given["additional_config"]["weight_nz_mode"] == 0 and given["async_scheduling"] is False and given["enforce_eager"] is True


def test_elsewhere_nothing_changes():
    assert not platforms.is_ascend() and platforms.worker() == platforms.CPU_WORKER
    given = options.engine_options()
    assert given["weight_transfer_config"] == {"backend": "tio"} and "block_size" not in given and "weight_nz_mode" not in given["additional_config"]


def test_another_vllm_is_refused_under_vllm_ascend(npu):
    from tio_megatron.integrations.vllm.refusals import check_versions

    with pytest.raises(ImportError, match=r"vllm 0.32.0 is installed; tio_megatron supports vllm 0.23.0"):
        check_versions()


def test_a_family_of_another_device_is_refused(npu):
    from tio_megatron.contract import Contract
    from tio_megatron.integrations.vllm.refusals import _family

    (line,) = map(str, _family(Contract()))
    assert "family cpu" in line and "use family npu-910b" in line

"""Off, the plug-in leaves stock vLLM alone; on, it can be taken back."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

from tio_megatron.contract import Contract, Cuts  # noqa: E402
from tio_megatron.integrations.vllm import engine_options, patches, plugin  # noqa: E402


def child(code: str, **environment: str) -> str:
    keep = {name: value for name, value in os.environ.items() if name != "TIO_CONTRACT"}
    done = subprocess.run([sys.executable, "-c", code], env=keep | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


OFF = """
import sys
from tio_megatron.integrations.vllm.plugin import is_active, register
register()
assert not is_active() and "torch" not in sys.modules and not any(name.split(".")[0] == "vllm" for name in sys.modules)
print("untouched")
"""


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_nothing_of_vllm_is_even_imported(value: str | None) -> None:
    assert child(OFF, **({} if value is None else {"TIO_CONTRACT": value})) == "untouched"


LOADED = """
import importlib, os
import vllm.plugins
vllm.plugins.load_general_plugins()
from tio_megatron.integrations.vllm import patches, plugin
from vllm.model_executor.models.registry import ModelRegistry
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
def held(target):
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    for name in path.split("."):
        owner = getattr(owner, name)
    return "ours" if "tio_megatron" in owner.__code__.co_filename else "stock"
def state():
    owners = sorted({held(patch.target) for patch in patches.all_patches() if not patch.may_be_absent})
    model = ModelRegistry.models["Qwen3MoeForCausalLM"].module_name.split(".")[0]
    return plugin.is_active(), owners, model, "tio" in WeightTransferEngineFactory._registry
off = state()
os.environ["TIO_CONTRACT"] = "1"
vllm.plugins.plugins_loaded = False
vllm.plugins.load_general_plugins()
print(*off, *state())
"""


def test_vllm_calls_the_entry_point_and_the_variable_decides() -> None:
    assert child(LOADED) == "False ['stock'] vllm False True ['ours'] tio_megatron True"


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(AssertionError, match="TIO_CONTRACT='nowhere.json'"):
        child("from tio_megatron.integrations.vllm.plugin import register; register()", TIO_CONTRACT="nowhere.json")


def held(target: str) -> Any:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return vars(owner).get(name)


def parameters(target: str) -> list[str]:
    function = held(target)
    return list(inspect.signature(function.__func__ if isinstance(function, staticmethod) else function).parameters)


def test_deactivate_puts_everything_back() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models.registry import ModelRegistry

    was_active = plugin.is_active()
    plugin.deactivate()
    targets = [patch.target for patch in patches.all_patches() if not patch.may_be_absent]
    added = [patch.target for patch in patches.all_patches() if patch.may_be_absent]
    before = [held(target) for target in targets] + [ModelRegistry.models[name] for name in plugin.MODELS]
    signatures = [parameters(target) for target in targets]
    try:
        plugin.activate(Contract())
        plugin.activate(Contract())
        assert all(held(target) is not stock for target, stock in zip(targets, before, strict=False))
        # vLLM reads signatures when a call comes from another process.
        assert [parameters(target) for target in targets] == signatures
        with pytest.raises(ValueError, match="cuts.attn_row: 8 / 4"):
            plugin.activate(Contract(cuts=Cuts(attn_row=4)))
        assert all(held(target) is not None for target in added)
        plugin.deactivate()
        plugin.deactivate()
        assert all(held(target) is None for target in added)
        assert [held(target) for target in targets] + [ModelRegistry.models[name] for name in plugin.MODELS] == before
        assert plugin.TRANSFER_BACKEND not in WeightTransferEngineFactory._registry and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    finally:
        if was_active:
            plugin.activate(Contract())


def test_no_layer_of_ours_outside_our_models() -> None:
    """The layer registry and the attention backend are ours only while one of our models is built."""
    from vllm.model_executor import custom_op

    from tio_megatron.integrations.vllm import scoped
    from tio_megatron.integrations.vllm.building import Build, current

    before, backend = dict(custom_op.op_registry_oot), scoped.stock_attention.get_attn_backend
    with pytest.raises(KeyError):
        with scoped.swapped(Build(Contract())):
            assert custom_op.op_registry_oot["RMSNorm"] is scoped.REPLACEMENTS["RMSNorm"] and current().contract == Contract()
            raise KeyError
    assert custom_op.op_registry_oot == before and scoped.stock_attention.get_attn_backend is backend
    with pytest.raises(RuntimeError, match="outside its model"):
        current()


def test_the_worker_class_needs_a_contract() -> None:
    from types import SimpleNamespace

    from tio_megatron.integrations.vllm.worker import TioWorker

    if plugin.is_active():
        pytest.skip("the plug-in is on in this process")
    with pytest.raises(ValueError, match="additional_config"):
        TioWorker(SimpleNamespace(additional_config={}))


def test_engine_options_carry_the_contract() -> None:
    options = engine_options('{"cuts": {"attn_row": 4}}', tp=2, expert_parallel=True, additional_config={"other": 1}, max_model_len=64)
    assert options["additional_config"] == {"other": 1, "tio_contract": Contract(cuts=Cuts(attn_row=4)).to_dict()}
    assert (options["tensor_parallel_size"], options["enable_expert_parallel"], options["max_model_len"]) == (2, True, 64)

"""What is not covered is refused by name, where the user starts the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.vllm import checkpoints
from tests.integrations.vllm.engines import Engine
from tio_megatron.contract import Contract, Cuts
from tio_megatron.integrations import releases
from tio_megatron.integrations.vllm import engine_options, plugin, refusals, rollout_contract
from tio_megatron.testing.qwen3 import MOE, write_tiny


@pytest.fixture(scope="module")
def config(moe: tuple[Path, Path]) -> Any:
    """What stock vLLM makes of a start that is covered."""
    return engine_config(moe[0])


def engine_config(folder: Path, **options: Any) -> Any:
    from vllm import EngineArgs

    common = dict(model=str(folder), skip_tokenizer_init=True, max_model_len=512, enforce_eager=True)
    return EngineArgs(**common | options).create_engine_config()


@pytest.fixture
def active() -> Iterator[None]:
    """The plug-in on in this process."""
    before = plugin.is_active()
    plugin.activate(Contract())
    yield
    if not before:
        plugin.deactivate()


def test_a_covered_start_has_no_problems(config: Any, active: None, moe: tuple[Path, Path]) -> None:
    assert list(refusals.problems(config, Contract())) == []
    assert engine_config(moe[0]).cache_config.block_size % 64 == 0


def setting(path: str, value: Any) -> Callable[[Any], None]:
    def apply(config: Any) -> None:
        *parents, name = path.split(".")
        owner = config
        for parent in parents:
            owner = getattr(owner, parent)
        object.__setattr__(owner, name, value)

    return apply


CASES = [
    ("model_config.dtype", torch.float16, "dtype='float16': no other element type has kernels; use bfloat16 or float32"),
    ("quant_config", SimpleNamespace(), "quantization"),
    ("lora_config", SimpleNamespace(), "enable_lora=True"),
    ("speculative_config", SimpleNamespace(), "speculative decoding"),
    ("cache_config.cache_dtype", "fp8_e4m3", "kv_cache_dtype='fp8_e4m3': keys and values of bfloat16 would be kept in another type; use auto"),
    ("kv_transfer_config", SimpleNamespace(), "kv_transfer_config"),
    ("load_config.load_format", "tensorizer", "load_format='tensorizer'"),
    ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
    ("parallel_config.data_parallel_size", 2, "data parallelism"),
    ("parallel_config.decode_context_parallel_size", 2, "decode context parallelism"),
    ("parallel_config.enable_eplb", True, "expert load balancing"),
    ("parallel_config.expert_placement_strategy", "round_robin", "expert_placement_strategy='round_robin': experts must be dealt out in runs; use linear"),
    ("model_config.hf_text_config.attention_bias", True, "attention_bias"),
    ("model_config.hf_text_config.use_sliding_window", True, "sliding_window=None: sliding windows"),
    ("model_config.hf_text_config.rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}, "rope .*yarn"),
    ("model_config.hf_text_config.rope_parameters", {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1]}, "mrope"),
    ("model_config.hf_text_config.hidden_act", "gelu", "hidden_act='gelu'"),
    ("model_config.hf_text_config.mlp_only_layers", [0], "dense layers among expert layers"),
    ("model_config.hf_text_config.shared_expert_intermediate_size", 64, "shared_expert_intermediate_size=64: not covered"),
    ("model_config.hf_text_config.dual_chunk_attention_config", {"chunk_size": 64}, "dual_chunk_attention_config"),
    ("model_config.max_model_len", 4096, "max_model_len=4096"),
]


@pytest.mark.parametrize(("path", "value", "words"), CASES, ids=[f"{path.rpartition('.')[2]}-{number}" for number, (path, _, _) in enumerate(CASES)])
def test_refused_by_name(config: Any, path: str, value: Any, words: str) -> None:
    changed = copy.deepcopy(config)
    setting(path, value)(changed)
    with pytest.raises(ValueError, match=words):
        refusals.check(changed, Contract())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(speculative_config=dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)), "speculative decoding"),
        (dict(enable_lora=True), "enable_lora=True"),
        (dict(block_size=96), "block_size=96: a page must hold whole blocks of keys; use a multiple of 64"),
        (dict(pipeline_parallel_size=2), "pipeline parallelism"),
        (dict(enforce_eager=False, compilation_config=dict(mode=1)), "compilation mode STOCK_TORCH_COMPILE: .*; leave the mode out"),
    ],
)
def test_refused_when_the_engine_is_started(active: None, moe: tuple[Path, Path], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_config(moe[0], **options)


def test_a_dtype_that_is_not_the_checkpoints_must_be_asked_for(active: None, tmp_path: Path) -> None:
    """vLLM's auto computes a float32 checkpoint in bfloat16; a trainer of it would not, and every token would differ."""
    folder = write_tiny(tmp_path / "fp32", MOE, torch_dtype="float32")
    with pytest.raises(ValueError, match="the checkpoint is float32, but dtype='auto' makes vLLM compute in bfloat16.*pass dtype='float32'"):
        engine_config(folder)
    for dtype in ("float32", "bfloat16"):
        assert engine_config(folder, dtype=dtype).model_config.dtype == getattr(torch, dtype)


def test_a_worker_without_the_plug_in_is_told_from_other_errors() -> None:
    class Off:
        def __init__(self, text: str) -> None:
            self.text = text

        def collective_rpc(self, method: str, **_: Any) -> None:
            raise RuntimeError(self.text)

    for text in ("method tio_contract is not implemented", "Worker failed with error ''CPUWorker' object has no attribute 'tio_contract''"):
        with pytest.raises(ValueError, match="tio_megatron is on in the trainer only"):
            rollout_contract(Off(text))
    with pytest.raises(RuntimeError, match="out of memory"):
        rollout_contract(Off("out of memory"))


def test_a_layout_that_misses_the_leaves_says_what_would_work(config: Any) -> None:
    changed = copy.deepcopy(config)
    changed.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ValueError, match=r"experts.down: cut into 2 parts, but cuts.expert_row = 1 leaves; tp 1 would work"):
        refusals.check(changed, Contract(cuts=Cuts(expert_row=1)))
    # Whole experts on each rank need no leaves.
    changed.parallel_config.enable_expert_parallel = True
    refusals.check(changed, Contract(cuts=Cuts(expert_row=1)))


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_cuts_that_do_not_fit_are_one_error_before_any_process_starts(moe: tuple[Path, Path], how: str) -> None:
    from vllm import LLM

    contract, was_active = Contract(cuts=Cuts(expert_row=1)), plugin.is_active()
    plugin.deactivate()
    options = engine_options(contract) if how == "argument" else {}
    if how == "environment":
        plugin.activate(contract)
    options |= dict(model=str(moe[0]), skip_tokenizer_init=True, max_model_len=512, tensor_parallel_size=2, distributed_executor_backend="mp")
    try:
        with pytest.raises(ValueError) as raised:
            LLM(**options)
    finally:
        plugin.deactivate()
        if was_active:
            plugin.activate(Contract())
    # Not pydantic's, which wraps the line into three.
    assert type(raised.value) is ValueError
    assert str(raised.value).splitlines() == [
        "tio_megatron does not cover:",
        "  experts.down: cut into 2 parts, but cuts.expert_row = 1 leaves; tp 1 would work, or cuts.expert_row = 2",
    ]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("nowhere.json", "TIO_CONTRACT='nowhere.json': contract: 'nowhere.json' is neither 1, default, a JSON object nor a file"),
        ('{"cuts"', "TIO_CONTRACT='{\"cuts\"': contract: not JSON (Expecting ':' delimiter: line 1 column 8 (char 7))"),
        ('{"cut": {}}', "TIO_CONTRACT='{\"cut\": {}}': "),
    ],
)
def test_a_bad_variable_is_the_error_of_starting_an_engine(moe: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, value: str, line: str) -> None:
    import vllm.plugins
    from vllm import LLM

    monkeypatch.setenv("TIO_CONTRACT", value)
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    with pytest.raises(ValueError) as raised:
        LLM(model=str(moe[0]))
    assert type(raised.value) is ValueError and str(raised.value).startswith(line)
    with pytest.raises(ValueError, match="contract: "):
        engine_options(value)


def test_another_architecture_is_refused(config: Any) -> None:
    changed = copy.deepcopy(config)
    object.__setattr__(changed, "model_config", SimpleNamespace(architectures=["LlamaForCausalLM"]))
    with pytest.raises(ValueError, match="LlamaForCausalLM.*unset TIO_CONTRACT"):
        refusals.check(changed, Contract())


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(releases.SUPPORTED, "vllm", ("0.33.0",))
    with pytest.raises(ImportError, match=r"vllm 0.32.0 is installed; tio_megatron supports vllm 0.33.0"):
        refusals.check_versions()


@pytest.mark.parametrize(("prompt", "words"), [([5] * 1100, "1024"), ([], "empty")])
def test_long_and_empty_prompts_are_refused_by_vllm(chunked: Engine, prompt: list[int], words: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises((ValueError, VLLMValidationError), match=words):
        chunked.generate([prompt])


@pytest.mark.parametrize("token", [checkpoints.VOCABULARY, -1])
def test_tokens_outside_the_vocabulary_are_refused(chunked: Engine, token: int) -> None:
    """vLLM looks only where it has a tokenizer; a padding row of the embedding must not be read."""
    with pytest.raises(ValueError, match=f"vocabulary of {checkpoints.VOCABULARY}"):
        chunked.model().model.embed_tokens(torch.tensor([5, token]))

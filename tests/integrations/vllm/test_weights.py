"""Weights moved into a running engine: every path, any subset, nothing stale, one copy."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState

from tests.integrations.vllm.checkpoints import VOCABULARY
from tests.integrations.vllm.engines import Engine, aborted_push_and_back, broken_off, prompts, scored
from tests.integrations.vllm.teacher import Teacher
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract, Cuts
from tio_megatron.integrations.vllm import push_weights, trainer_side

ASKED = prompts((5, 150), seed=20)


@pytest.fixture
def restored(chunked: Engine) -> Iterator[Engine]:
    """The shared engine, with its own weights again afterwards."""
    yield chunked
    push_weights(chunked.llm, Checkpoint(chunked.folder).tensors(), chunked.contract)
    chunked.check(chunked.generate(ASKED, prompted=False), what="back again")


def load_by_vllm(engine: Engine, folder: Path) -> None:
    engine.rpc("tio_load", str(folder / "model.safetensors"))


def load_in_buckets(engine: Engine, folder: Path) -> None:
    """As verl does: ``load_weights`` on the worker's model, bucket after bucket."""
    named = list(Checkpoint(folder).tensors())
    random.Random(0).shuffle(named)
    model = engine.model()
    for start in range(0, len(named), 7):
        model.load_weights(iter(named[start : start + 7]))


def reload_by_vllm(engine: Engine, folder: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(folder)))


def push(engine: Engine, folder: Path) -> None:
    named = list(Checkpoint(folder).tensors())
    random.Random(1).shuffle(named)
    sent = push_weights(engine.llm, named, engine.contract, bucket_bytes=100_000)
    assert sent == Checkpoint(folder).digests()


@pytest.mark.parametrize("path", [push, load_by_vllm, load_in_buckets, reload_by_vllm])
def test_every_path_there_and_back(restored: Engine, moe: tuple[Path, Path], path) -> None:
    before = restored.generate(ASKED, prompted=False)
    memory = restored.rpc("tio_memory")
    for folder in (moe[1], moe[0]):
        path(restored, folder)
        answers = restored.generate(ASKED, prompted=False)
        restored.check(answers, restored.teacher(folder), what=folder.name)
        assert restored.rpc("tio_digests") == Checkpoint(folder).digests()
        assert restored.rpc("tio_memory") == memory and memory["raw"] == 0
    assert [one.tokens for one in answers] == [one.tokens for one in before]


@pytest.mark.parametrize("path", [push, load_by_vllm, reload_by_vllm])
def test_dense_tied_there_and_back(dense: Engine, path) -> None:
    """Embedding and head read one packed copy: nothing raw beside it, before and after."""
    assert dense.second is not None
    memory = dense.rpc("tio_memory")
    sizes = {name: tensor.nbytes for name, tensor in Checkpoint(dense.folder).tensors()}
    rows, padded = sizes["model.embed_tokens.weight"], -(-VOCABULARY // 64) * 64
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    assert memory == {"packed": sum(sizes.values()) - norms - rows + rows * padded // VOCABULARY, "raw": 0, "other": norms}
    for folder in (dense.second, dense.folder):
        path(dense, folder)
        dense.check(dense.generate(ASKED, prompted=False), dense.teacher(folder), what=folder.name)
        assert dense.rpc("tio_digests") == Checkpoint(folder).digests()
        assert dense.rpc("tio_memory") == memory


def test_any_subset_of_names(restored: Engine, moe: tuple[Path, Path], tmp_path: Path) -> None:
    """Parts of fused weights (q of qkv, one projection of one expert) leave the rest as it was."""
    layers = "model.layers."
    names = (f"{layers}0.self_attn.q_proj.weight", f"{layers}1.mlp.experts.3.up_proj.weight", f"{layers}1.mlp.gate.weight", "model.norm.weight")
    new = {name: tensor for name, tensor in Checkpoint(moe[1]).tensors() if name in names}
    with pytest.raises(ValueError, match=r"tensors did not come and are as they were: .*partial=True"):
        push_weights(restored.llm, new.items(), restored.contract)
    push_weights(restored.llm, new.items(), restored.contract, partial=True)
    mixed = Teacher(moe[0], restored.contract)
    mixed.weights |= new
    restored.check(restored.generate(ASKED), mixed)
    # The same by vLLM's layerwise reload, which makes new, unfilled parameters.
    load_by_vllm(restored, moe[0])
    restored.worker().reload_weights(weights_iterator=iter(list(new.items())))
    restored.check(restored.generate(ASKED), mixed)


def test_contracts_that_differ_are_refused_with_the_fields_named(chunked: Engine, moe: tuple[Path, Path]) -> None:
    other = Contract(cuts=Cuts(attn_row=4))
    with pytest.raises(ValueError, match="cuts.attn_row: 4 / 8"):
        push_weights(chunked.llm, Checkpoint(moe[1]).tensors(), other)
    # The engine refuses as well, for trainers that do not ask first.
    info = {"contract": other.to_dict(), "kernels": chunked.rpc("tio_contract")["kernels"]}
    with pytest.raises(ValueError, match="cuts.attn_row: 8 / 4"):
        chunked.llm.collective_rpc("init_weight_transfer_engine", kwargs=dict(init_info=info))
    info = {"contract": chunked.contract.to_dict(), "kernels": "cpu-0"}
    with pytest.raises(ValueError, match="kernels: .* / cpu-0"):
        chunked.llm.collective_rpc("init_weight_transfer_engine", kwargs=dict(init_info=info))
    chunked.check(chunked.generate(ASKED[:1]))


def test_other_bytes_than_the_trainers_stop_the_engine(restored: Engine, moe: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    stock = trainer_side._save

    def tampered(bucket: dict[str, torch.Tensor], path: Path) -> None:
        stock({key: tensor + 1 if key == name else tensor for key, tensor in bucket.items()}, path)

    monkeypatch.setattr(trainer_side, "_save", tampered)
    with pytest.raises(ValueError, match=name):
        push_weights(restored.llm, Checkpoint(moe[1]).tensors(), restored.contract)
    model = restored.model()
    with pytest.raises(ValueError, match="weights are not whole"):
        model(torch.tensor([3]), torch.tensor([0]))
    monkeypatch.undo()
    push_weights(restored.llm, Checkpoint(moe[1]).tensors(), restored.contract)
    restored.check(restored.generate(ASKED), restored.teacher(moe[1]))


def test_unknown_and_misshapen_tensors(restored: Engine, moe: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such"):
        push_weights(restored.llm, [("model.no_such.weight", torch.zeros(2))], restored.contract)
    with pytest.raises(ValueError, match="model.norm.weight is torch.float32"):
        push_weights(restored.llm, [("model.norm.weight", torch.zeros(256))], restored.contract)
    push_weights(restored.llm, Checkpoint(moe[0]).tensors(), restored.contract)
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 256, dtype=torch.bfloat16)}, tmp_path / "bad.safetensors")
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        restored.rpc("tio_load", str(tmp_path / "bad.safetensors"))
    with pytest.raises(ValueError, match="weights are not whole: a load of weights failed"):
        restored.model()(torch.tensor([3]), torch.tensor([0]))
    load_by_vllm(restored, moe[1])
    restored.check(restored.generate(ASKED), restored.teacher(moe[1]))


def test_an_aborted_push_refuses_requests_and_everything_again_mends_it(restored: Engine, moe: tuple[Path, Path]) -> None:
    aborted_push_and_back(restored, moe[1])


def test_a_push_aborted_before_anything_arrived_changes_nothing(chunked: Engine) -> None:
    with pytest.raises(KeyError):
        push_weights(chunked.llm, broken_off(Checkpoint(chunked.folder).tensors(), 0), chunked.contract)
    chunked.check(chunked.generate(ASKED))


def test_a_paused_engine_keeps_its_requests(restored: Engine, moe: tuple[Path, Path]) -> None:
    """Stock's way to update under load: requests that come during a pause wait, whole weights or not."""
    core = restored.llm.llm_engine.engine_core.engine_core
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    with pytest.raises(KeyError):
        push_weights(restored.llm, broken_off(Checkpoint(moe[1]).tensors(), 20), restored.contract, bucket_bytes=100_000)
    restored.llm.enqueue([dict(prompt_token_ids=ASKED[0])], SamplingParams(temperature=0, max_tokens=2, logprobs=0, detokenize=False), use_tqdm=False)
    assert restored.llm.llm_engine.step() == []
    push_weights(restored.llm, Checkpoint(moe[1]).tensors(), restored.contract)
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    (answer,) = restored.llm.wait_for_completion(use_tqdm=False)
    restored.check([scored(ASKED[0], answer)], restored.teacher(moe[1]))


def test_sleep_and_wake_keep_the_weights(restored: Engine, moe: tuple[Path, Path]) -> None:
    """vLLM does nothing at sleep on this platform; an update between the two is as right."""
    restored.llm.sleep(level=1)
    load_by_vllm(restored, moe[1])
    restored.llm.wake_up()
    restored.check(restored.generate(ASKED), restored.teacher(moe[1]))


def test_a_write_that_passes_by_the_loaders_fails(chunked: Engine) -> None:
    parameter = chunked.model().get_parameter("model.layers.0.self_attn.qkv_proj.weight")
    with pytest.raises(RuntimeError):
        parameter.data.copy_(torch.zeros(768, 256))


def test_the_first_stamp_of_the_contract_is_readable(chunked: Engine) -> None:
    answer = chunked.rpc("tio_contract")
    assert Contract.from_json(json.dumps(answer["contract"])) == chunked.contract
    assert answer["fingerprint"] == chunked.contract.fingerprint(answer["kernels"]) and answer["layout"] == "TP 1"

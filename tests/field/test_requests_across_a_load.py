"""A request that runs while weights are loaded never answers with two sets of weights: it ends with an error, by every path of an update."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.engines import Engine, Scored, prompts, scored

pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402

from tio_megatron import kernels  # noqa: E402
from tio_megatron.checkpoint import Checkpoint  # noqa: E402
from tio_megatron.contract import Contract  # noqa: E402
from tio_megatron.integrations.vllm import engine_options, push_weights  # noqa: E402
from tio_megatron.testing import assert_same_bytes  # noqa: E402

BEGUN, LATER = prompts((150, 70), seed=50)
SEEDS = itertools.count(60)
ASKED = SamplingParams(temperature=0, max_tokens=60, logprobs=0, ignore_eos=True, detokenize=False)
REFUSED = "weights are not whole: a load changed them while the request was running"


def sources(engine: Engine, answer: Scored) -> list[str]:
    """The checkpoints whose scoring has the bytes of every log-probability of ``answer``."""
    found = []
    for folder in (engine.folder, engine.second):
        try:
            engine.check([answer], engine.teacher(folder))
        except AssertionError:
            continue
        found.append(folder.name)
    return found


def file_of(folder: Path) -> str:
    return str(folder / "model.safetensors")


def _load_file(worker: Any, path: str) -> None:
    worker.tio_load(path)


def load_by_rpc(engine: Engine, folder: Path) -> None:
    engine.rpc("tio_load", file_of(folder))


def load_by_function(engine: Engine, folder: Path) -> None:
    engine.llm.collective_rpc(_load_file, args=(file_of(folder),))


def reload(engine: Engine, folder: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(folder)))


def push(engine: Engine, folder: Path) -> None:
    push_weights(engine.llm, Checkpoint(folder).tensors(), engine.contract)


def update_in_calls(engine: Engine, folder: Path) -> None:
    for method, fields in update_calls(folder):
        engine.llm.collective_rpc(method, kwargs=fields)


def load_the_model(engine: Engine, folder: Path) -> None:
    """Past the engine's core, on the worker's model, as a trainer in the same process may do."""
    engine.model().load_weights(Checkpoint(folder).tensors())


def load_the_model_and_reset(engine: Engine, folder: Path) -> None:
    load_the_model(engine, folder)
    engine.llm.reset_prefix_cache(reset_running_requests=True)


def update_calls(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    agreed = dict(contract=Contract().to_dict(), kernels=kernels.version())
    return [
        ("init_weight_transfer_engine", dict(init_info=agreed)),
        ("start_weight_update", {}),
        ("update_weights", dict(update_info=dict(path=file_of(folder)))),
        ("finish_weight_update", {}),
    ]


PATHS = (load_by_rpc, load_by_function, reload, push, update_in_calls, load_the_model, load_the_model_and_reset)


def begin(engine: Engine, steps: int, prompt: list[int] = BEGUN) -> None:
    engine.llm.llm_engine.add_request("begun", dict(prompt_token_ids=prompt), ASKED)
    for _ in range(steps):
        engine.llm.llm_engine.step()


def run(engine: Engine) -> list[Any]:
    outputs = []
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs += engine.llm.llm_engine.step()
    return outputs


@pytest.mark.parametrize("path", PATHS)
def test_a_decoding_request_is_refused_and_a_new_one_has_the_new_weights(engine: Engine, path) -> None:
    """The new requests begin with the same tokens: pages of older weights are not read either."""
    for new in (engine.second, engine.folder):
        begin(engine, 6)
        path(engine, new)
        with pytest.raises(ValueError, match=REFUSED):
            run(engine)
        assert not engine.llm.llm_engine.has_unfinished_requests()
        engine.check(engine.generate([BEGUN, LATER], prompted=False), engine.teacher(new), what=new.name)


@pytest.mark.parametrize("path", PATHS)
def test_in_the_middle_of_its_prompt_too(engine: Engine, path) -> None:
    for new in (engine.second, engine.folder):
        (prompt,) = prompts((300,), seed=next(SEEDS))
        begin(engine, 1, prompt)  # 96 of 300 tokens
        path(engine, new)
        if path is load_the_model_and_reset:  # its computed tokens are forgotten before the core looks: it begins again, whole
            assert sources(engine, scored(prompt, run(engine)[-1])) == [new.name]
        else:
            with pytest.raises(ValueError, match=REFUSED):
                run(engine)


def test_without_the_look_a_request_is_neither_of_the_two(engine: Engine) -> None:
    """The negative control: what is refused would answer with log-probabilities of both checkpoints."""
    core = engine.llm.llm_engine.engine_core.engine_core
    for load, expected in ((False, ["a"]), (True, [])):
        begin(engine, 6)
        if load:
            load_by_rpc(engine, engine.second)
            core.tio_begun.clear()
        answer = scored(BEGUN, run(engine)[-1])
        assert len(answer.tokens) == 60 and sources(engine, answer) == expected
    load_by_rpc(engine, engine.folder)


def test_an_aborted_update_that_loaded_nothing_lets_a_request_go_on(engine: Engine) -> None:
    begin(engine, 6)
    for method, fields in update_calls(engine.second)[:2]:
        engine.llm.collective_rpc(method, kwargs=fields)
    engine.rpc("tio_abort_update")
    assert sources(engine, scored(BEGUN, run(engine)[-1])) == ["a"]


def test_an_asynchronous_client_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core in a process of its own: the begun request ends with the error, a request that waits in a pause has the new weights."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    from vllm import envs

    envs.disable_envs_cache()
    a, b = engine.folder, engine.second
    options = engine_options(
        engine.contract, model=str(a), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024, block_size=64, max_num_seqs=8, num_gpu_blocks_override=48
    )

    async def answer(stream: AsyncIterator[Any], prompt: list[int]) -> Scored:
        return scored(prompt, [output async for output in stream][-1])

    async def all_paths() -> None:
        client = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        try:
            paths: list[list[tuple[str, dict[str, Any]]]] = [
                [("tio_load", dict(path=file_of(b)))],
                [("reload_weights", dict(weights_path=str(a)))],
                update_calls(b),
            ]
            for number, calls in enumerate(paths):
                for paused in (False, True):
                    name = f"{number} {paused}"
                    begun = client.generate(dict(prompt_token_ids=BEGUN), ASKED, name)
                    assert (await anext(begun)).outputs[0].token_ids
                    if paused:
                        await client.pause_generation(mode="keep")
                        waiting = asyncio.create_task(answer(client.generate(dict(prompt_token_ids=LATER), ASKED, f"{name} waits"), LATER))
                        await asyncio.sleep(0.1)
                    for method, fields in calls:
                        await client.collective_rpc(method, kwargs=fields)
                    if paused:
                        await client.resume_generation()
                    with pytest.raises(ValueError, match="weights are not whole"):
                        await answer(begun, BEGUN)
                    after = await (waiting if paused else answer(client.generate(dict(prompt_token_ids=LATER), ASKED, f"{name} after"), LATER))
                    assert sources(engine, after) == [a.name if number == 1 else b.name]
        finally:
            client.shutdown()

    asyncio.run(all_paths())


def test_the_two_checkpoints_differ(engine: Engine) -> None:
    one = engine.generate([BEGUN])[0]
    assert sources(engine, one) == ["a"]
    with pytest.raises(AssertionError):
        assert_same_bytes(engine.teacher(engine.folder).logprobs(BEGUN), engine.teacher(engine.second).logprobs(BEGUN))

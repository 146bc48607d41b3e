"""The API server under ``TIO_CONTRACT``: over HTTP the same floats as an engine in this process, and the same care about half-loaded weights."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.qwen3_moe.corpus import corpus, save_tokenizer, train_tokenizer
from examples.qwen3_moe.makers import make_random, tiny_config
from tests.integrations.vllm.engines import Engine
from tio_megatron import kernels
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract

pytestmark = pytest.mark.full

PROMPTS = ["def f(x):", "The license of this library is", "import os\n" * 60]


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of random weights with the job's tokenizer."""
    root = tmp_path_factory.mktemp("tokenized")
    files = tuple(save_tokenizer(train_tokenizer(corpus(), 4096), root / "tokenizer"))
    for seed in (0, 1):
        make_random(root / f"seed-{seed}", tiny_config(layers=2), seed, files)
    return root / "seed-0", root / "seed-1"


class Server:
    """``python -m vllm.entrypoints.openai.api_server`` on a free port."""

    def __init__(self, folder: Path, log: Path, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--block-size", "64", "--max-model-len", "1024", "--max-num-seqs", "8"]
        command += ["--kv-cache-memory-bytes", str(256 << 20)]  # left alone vLLM wants nine tenths of the memory, and refuses to start where others use it
        command += ["--worker-extension-cls", "tio_megatron.integrations.vllm.worker.WorkerExtension", "--weight-transfer-config", '{"backend": "tio"}']
        # An eager engine in this process has switched the compiler off for what it starts; the server is a process of its own.
        dropped = ("VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
        keep = {name: value for name, value in os.environ.items() if name not in dropped}
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=keep | environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self) -> None:
        """Until it answers."""
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-3000:])

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read()

    def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        """Status and answer."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(fields).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, prompt: Any, **fields: Any) -> tuple[int, Any]:
        """A completion with log-probabilities of prompt and answer."""
        asked: dict[str, Any] = dict(model="tiny", prompt=prompt, max_tokens=12, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
        return self.post("/v1/completions", **asked | dict(return_token_ids=True) | fields)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=300)
            except subprocess.TimeoutExpired:
                pass
        try:
            # Its own session: what is left of it.
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@pytest.fixture(scope="module")
def server(tokenized: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tokenized[0], tmp_path_factory.mktemp("server") / "log", TIO_CONTRACT="1", VLLM_SERVER_DEV_MODE="1")
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def engine(tokenized: tuple[Path, Path], server: Server) -> Iterator[Engine]:
    """The same model in this process; its options differ where bytes must not care."""
    with Engine.start(tokenized[0], max_num_batched_tokens=96, enable_prefix_caching=True) as engine:
        yield engine


def check(engine: Engine, folder: Path, choice: dict[str, Any]) -> None:
    """The numbers of an HTTP answer are those of the engine in this process, by their shortest decimal form, and so are the teacher's."""
    prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
    (here,) = engine.generate([prompt + tokens], tokens=1)
    assert here.prompted is not None
    expected = [repr(value) for value in here.prompted.tolist()]
    prompted = [repr(row[str(token)]["logprob"]) for row, token in zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)]
    answered = [repr(value) for value in choice["logprobs"]["token_logprobs"]]
    assert prompted + answered == expected and len(answered) == 12
    engine.check([here], engine.teacher(folder))


def test_answers_have_the_floats_of_the_engine_in_process(server: Server, engine: Engine, tokenized: tuple[Path, Path]) -> None:
    status, together = server.complete(PROMPTS)
    assert status == 200, together
    for choice in together["choices"]:
        check(engine, tokenized[0], choice)
        # Sampled here, not scored: the same tokens and floats again.
        (here,) = engine.generate([choice["prompt_token_ids"]], tokens=12)
        assert here.tokens == choice["token_ids"]
        assert [repr(value) for value in here.sampled.tolist()] == [repr(value) for value in choice["logprobs"]["token_logprobs"]]
    answers: list[Any] = [None] * len(PROMPTS)

    def ask(number: int) -> None:
        answers[number] = server.complete(PROMPTS[number], temperature=0.9, seed=number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for status, answer in answers:
        assert status == 200, answer
        check(engine, tokenized[0], answer["choices"][0])


def test_half_an_update_is_503_and_a_whole_one_mends_it(server: Server, engine: Engine, tokenized: tuple[Path, Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    named = list(Checkpoint(tokenized[1]).tensors())
    files = [tmp_path / f"{part}.safetensors" for part in range(2)]
    for part, file in enumerate(files):
        save_file(dict(named[part::2]), str(file))
    agreed = dict(contract=Contract().to_dict(), kernels=kernels.version())
    assert server.post("/init_weight_transfer_engine", init_info=agreed)[0] == 200
    assert server.post("/start_weight_update")[0] == 200
    assert server.post("/update_weights", update_info=dict(path=str(files[0])))[0] == 200
    status, answer = server.complete(PROMPTS[0])
    assert status == 503 and "weights are not whole: a weight update was started and not finished" in answer["error"]["message"]
    assert server.post("/collective_rpc", method="tio_abort_update")[0] == 200
    for _ in range(2):
        status, answer = server.complete(PROMPTS)
        assert status == 503 and "an update of the weights was aborted; load all of them again" in answer["error"]["message"]
    assert server.post("/pause?mode=keep")[0] == 200
    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(server.complete(PROMPTS[1])))
    thread.start()
    assert server.post("/start_weight_update")[0] == 200
    for file in files:
        assert server.post("/update_weights", update_info=dict(path=str(file)))[0] == 200
    assert server.post("/finish_weight_update")[0] == 200
    time.sleep(1)
    assert not waiting
    assert server.post("/resume")[0] == 200
    thread.join()
    engine.rpc("tio_load", str(tokenized[1] / "model.safetensors"))
    for status, answer in (waiting[0], server.complete(PROMPTS[2])):
        assert status == 200, answer
        check(engine, tokenized[1], answer["choices"][0])


def test_a_request_that_a_load_finds_running_is_503(server: Server, engine: Engine, tokenized: tuple[Path, Path]) -> None:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.complete(PROMPTS[0], max_tokens=900, prompt_logprobs=None)))
    thread.start()
    while not re.search(rb"^vllm:num_requests_running\S* 1", server.get("/metrics"), re.MULTILINE) and thread.is_alive():
        time.sleep(0.05)
    assert server.post("/collective_rpc", method="tio_load", args=[str(tokenized[1] / "model.safetensors")])[0] == 200
    thread.join()
    ((status, answer),) = answers
    assert status == 503 and "weights are not whole: a load changed them while the request was running" in answer["error"]["message"], answer
    engine.rpc("tio_load", str(tokenized[1] / "model.safetensors"))
    status, answer = server.complete(PROMPTS[1])
    assert status == 200, answer
    check(engine, tokenized[1], answer["choices"][0])


def test_a_bad_contract_is_the_last_line(tokenized: tuple[Path, Path], tmp_path: Path) -> None:
    server = Server(tokenized[0], tmp_path / "log", TIO_CONTRACT="nowhere.json")
    try:
        assert server.process.wait(timeout=120) != 0
    finally:
        server.stop()
    said = "ValueError: TIO_CONTRACT='nowhere.json': contract: 'nowhere.json' is neither 1, default, a JSON object nor a file"
    assert server.log.read_text().splitlines()[-1].endswith(said)

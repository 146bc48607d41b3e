"""A vLLM worker that is killed is named with its signal, and the engine leaves no sockets and no shared memory behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, signal, tempfile
from pathlib import Path

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from tests.integrations.vllm.checkpoints import make
    from tio_megatron.integrations.vllm import engine_options
    from tio_megatron.integrations.vllm.ending import leaving_no_files, remove_files

    def sockets():
        return [file for file in Path(tempfile.gettempdir()).iterdir() if file.is_socket()]

    def memory():
        return [*Path("/dev/shm").glob(f"{meeting}-*")]

    options = dict(skip_tokenizer_init=True, max_model_len=1024, block_size=64, num_gpu_blocks_override=48, kv_cache_memory_bytes=1 << 28)
    with leaving_no_files():
        llm = LLM(model=str(make(Path("a"), 0)), **engine_options(tp=2, **options))
        own = Path(tempfile.gettempdir())
        (meeting,) = (file.name for file in own.glob("vllm_dist_*"))
        print("while it starts", len(sockets()) > 0, len(memory()))
    asked = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": [3, 4, 5]}, asked, use_tqdm=False)
    llm.llm_engine.add_request("r", dict(prompt_token_ids=[3, 4, 5]), asked)
    for _ in range(5):
        llm.llm_engine.step()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.workers[1].proc
    os.kill(worker.pid, signal.SIGKILL)
    try:
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    except RuntimeError as error:
        print("said", str(error).replace(str(worker.pid), "PID"))
    remove_files()
    print("in the end", own.exists(), sockets(), memory(), flush=True)
    os._exit(0)
"""


def test_it_is_named_and_nothing_stays(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "file.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "TIO_CONTRACT"}
    variables |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60"}
    done = subprocess.run([sys.executable, "-W", "ignore", "file.py"], capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=500)
    lines = [line for line in done.stdout.splitlines() if re.match("while it starts|said|in the end", line)]
    assert lines == [
        "while it starts True 2",
        "said vLLM's worker of rank 1 (process PID) was ended by SIGKILL; the engine has ended",
        "in the end False [] []",
    ], done.stdout[-3000:] + done.stderr[-3000:]

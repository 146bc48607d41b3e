"""The room is usable on its own."""

import subprocess
import sys


def test_importing_it_loads_no_engine():
    code = "import sys, tio_megatron.rl; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded and not {"megatron", "vllm", "deepspeed", "verl", "transformers"} & set(loaded)

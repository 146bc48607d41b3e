"""The schemas of the torch_npu operators that this package calls, as the wheel registers them: written to a file, or compared with it.

Needs torch_npu, so it runs in the environment of ``make test-ascend``::

    make remake-ascend      # writes tests/npu/schemas_torch_npu_2.13.0.txt anew; then look at the difference, and bring the table in line
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

VERSION = "2.13.0"
FILE = Path(__file__).with_name(f"schemas_torch_npu_{VERSION}.txt")
TABLE = Path(__file__).resolve().parents[2] / "tio_megatron" / "kernels" / "npu" / "schemas.py"


def names() -> list[str]:
    """The operators that the package names in its table of schemas (read as text: the package itself is not needed here)."""
    return list(dict.fromkeys(re.findall(r'"npu::(\w+)\(', TABLE.read_text())))


def registered(name: str) -> str:
    """One line: the schema of ``npu::name`` in the wheel that is imported."""
    return str(getattr(torch.ops.npu, name).default._schema)


def snapshot() -> str:
    return "".join(registered(name) + "\n" for name in names())


if __name__ == "__main__":
    import torch_npu

    if torch_npu.__version__.split("+")[0] != VERSION:
        raise SystemExit(f"torch_npu {torch_npu.__version__} is installed; the snapshot is of {VERSION}")
    FILE.write_text(snapshot())
    print(f"wrote {FILE}")

"""A process of the self-check of NPUs that fails after its first answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tio_megatron.verify.ascend.answers import Answer


def rank(rank: int, size: int, ranks: str, told: str, *rest: Any) -> None:
    """In the place of ``verify.ascend.run._rank``."""
    Path(told).write_text(json.dumps({"one": [Answer("asked before", "yes").to_dict()]}))
    raise RuntimeError("HCCL could not start")

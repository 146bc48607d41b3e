"""The environment of ``make test-deepspeed`` is what the extra asks for, at the locked versions, and the supported DeepSpeed."""

import ast
import re
from pathlib import Path

from tio_megatron.integrations import releases

ROOT = Path(__file__).resolve().parents[2]


def pins(path: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / path).read_text(), re.MULTILINE))


def extra() -> list[str]:
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.keyword) and node.arg == "extras_require"]
    return [re.split(r"[<>=]", name)[0] for name in ast.literal_eval(calls[0].value)["deepspeed"]]


def test_everything_that_the_extra_names_is_pinned() -> None:
    assert len(extra()) == 9
    assert set(extra()) <= set(pins("tests/integrations/deepspeed/requirements.txt"))


def test_versions_are_the_locked_ones_and_the_supported_one() -> None:
    here, locked = pins("tests/integrations/deepspeed/requirements.txt"), pins("requirements.lock")
    assert {name: version for name, version in here.items() if locked.get(name, version) != version} == {}
    assert here["deepspeed"] in releases.SUPPORTED["deepspeed"]

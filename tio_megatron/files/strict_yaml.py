"""Reads YAML that people write: plain data, and every name once in a mapping."""

from __future__ import annotations

from typing import Any

import yaml

from tio_megatron.files.strict_json import GivenTwice, plain
from tio_megatron.findings.messages import shown


class _Once(yaml.SafeLoader):
    """The safe loader, which would take the last of two values without a word. A merge (``<<``) may be overridden, as YAML has it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                    if (key.tag, key.value) in seen:
                        raise GivenTwice(f"{shown(key.value)} is given twice, the second time in line {key.start_mark.line + 1}")
                    seen.add((key.tag, key.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def read_yaml(text: str) -> Any:
    """What a YAML document holds, with the safe loader's types.

    Raises:
        GivenTwice: a mapping has a name twice.
        yaml.YAMLError, ValueError, OverflowError, AttributeError, RecursionError: no YAML; PyYAML lets Python's own errors of odd scalars through.

    >>> read_yaml("a: 1\\na: 2")
    Traceback (most recent call last):
    ...
    tio_megatron.files.strict_json.GivenTwice: 'a' is given twice, the second time in line 2
    """
    loader = _Once(text)
    try:
        return loader.get_single_data()
    except ValueError as error:
        raise plain(error) from None
    finally:
        loader.dispose()

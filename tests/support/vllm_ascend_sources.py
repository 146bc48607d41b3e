"""Reads the sources of vllm-ascend and of vLLM 0.23 without importing them, for names and signatures: ``python vllm_ascend_sources.py VLLM_ASCEND VLLM``.

Prints the snapshot that CI compares our needs with (``tests/golden/vllm_ascend.json``): facts about what is there, no code.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tio_megatron.integrations.vllm.ascend.needs import NEEDS, VLLM, Need

PLUGIN = Path(__file__).resolve().parents[2] / "tio_megatron" / "integrations" / "vllm"


@cache
def parsed(root: Path, module: str) -> ast.Module | None:
    """The tree of a module, or None if there is no such file."""
    place = root.joinpath(*module.split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(), str(file))
    return None


def names(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """What a body of statements binds, conditions and handlers included."""
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                found |= names(getattr(node, part, []))
    return found


def lookup(root: Path, symbol: str) -> ast.AST | None:
    """The node of ``module:name`` or ``module:Class.method``; a name that a package imports from its own parts is followed."""
    module, _, path = symbol.partition(":")
    tree = parsed(root, module)
    if tree is None:
        return None
    node: ast.AST = tree
    for part in path.split("."):
        node = names(getattr(node, "body", [])).get(part)  # type: ignore[assignment]
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == module.partition(".")[0]:
            node = lookup(root, f"{node.module}:{part}") or node
        if node is None:
            # from .parallel_state import *
            stars = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and any(alias.name == "*" for alias in n.names) and n.module]
            inside = (lookup(root, f"{star if star.startswith(module) else module + '.' + star}:{path}") for star in stars)
            return next((one for one in inside if one is not None), None)
    return node


def facts(root: Path, need: Need) -> dict[str, Any] | None:
    """What is there under a symbol; None if nothing is."""
    node = lookup(root, need.symbol)
    if node is None:
        return None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = node.args
        found: dict[str, Any] = {"parameters": [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]}
        calls = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"}
        return found | ({"uses": sorted(calls & set(need.calls))} if need.calls else {})
    if isinstance(node, ast.ClassDef):
        own = names(node.body)
        first = own.get("__init__")
        assigned = {
            target.attr
            for n in ast.walk(first if first is not None else node)
            if isinstance(n, (ast.Assign, ast.AnnAssign))
            for target in (n.targets if isinstance(n, ast.Assign) else [n.target])
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
        }
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        there = set(own) | assigned
        return {"bases": bases, "attributes": sorted(there & set(need.attributes)), "defines": sorted(set(own) & set(need.lacks))}
    return {"kind": "value"}


def unmet(need: Need, found: dict[str, Any] | None) -> list[str]:
    """Why a need is not met; empty when it is."""
    if found is None:
        return [f"{need.symbol} is not there ({need.why})"]
    problems = []
    if need.parameters is not None and found.get("parameters", [])[: len(need.parameters)] != list(need.parameters):
        problems.append(f"{need.symbol}: its parameters are {found.get('parameters')}, and {list(need.parameters)} are needed ({need.why})")
    for what, wanted, there in (("bases", need.bases, "bases"), ("attributes", need.attributes, "attributes"), ("calls", need.calls, "uses")):
        missing = sorted(set(wanted) - set(found.get(there, [])))
        if missing:
            problems.append(f"{need.symbol}: {what} {missing} are missing ({need.why})")
    if found.get("defines"):
        problems.append(f"{need.symbol}: has {found['defines']} of its own, and a patch of ours is on the base's ({need.why})")
    return problems


def registered(root: Path) -> list[str]:
    """Names under which ``register_ascend_customop`` registers layers."""
    function = lookup(root, "vllm_ascend.utils:register_ascend_customop")
    assert function is not None
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "REGISTERED_ASCEND_OPS":
            found |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    return sorted(found)


def options(root: Path) -> list[str]:
    """Keys of ``additional_config`` that the configuration class reads."""
    found = set()
    for module in ("vllm_ascend.ascend_config", "vllm_ascend.utils"):
        tree = parsed(root, module)
        assert tree is not None
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                where, strings = ast.unparse(node.func.value), [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                if node.func.attr == "get" and where.rpartition(".")[2] == "additional_config":
                    found |= set(strings[:1])
                elif node.func.attr == "_get_config_value":
                    found |= set(strings[:1])
    return sorted(found)


def variables(root: Path) -> list[str]:
    """Environment variables of ``vllm_ascend.envs``."""
    node = lookup(root, "vllm_ascend.envs:env_variables")
    assert isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    return sorted(key.value for key in node.value.keys if isinstance(key, ast.Constant))


def imported() -> list[str]:
    """Every ``module:name`` of vLLM that the plug-in's files import, those for a CPU alone left out."""
    found = set()
    for file in sorted(PLUGIN.rglob("*.py")):
        if file.name in ("attention.py", "worker.py", "transfer.py") and file.parent == PLUGIN:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return sorted(found)


def present(root: Path, symbol: str) -> bool:
    """Whether an import of ``module:name`` finds something: a name, or a module."""
    module, _, name = symbol.partition(":")
    return lookup(root, symbol) is not None or parsed(root, f"{module}.{name}") is not None


def snapshot(ascend: Path, vllm: Path) -> dict[str, Any]:
    """All of it."""
    return {
        "needs": {need.symbol: facts(ascend, need) for need in NEEDS},
        "registered": registered(ascend),
        "options": options(ascend),
        "variables": variables(ascend),
        "vllm": {need.symbol: facts(vllm, need) for need in VLLM},
        "vllm_imports": {symbol: present(vllm, symbol) for symbol in imported()},
    }


if __name__ == "__main__":
    print(json.dumps(snapshot(Path(sys.argv[1]), Path(sys.argv[2])), indent=1, sort_keys=True))

"""Another text for one function of Triton, in this process: how tests plant an order or a rounding and see whether it is noticed."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KIND = {"div_rn": "division", "sqrt_rn": "square root"}


def functions() -> dict[str, Any]:
    """Every function of Triton in the package, by module and name."""
    from triton.runtime.jit import JITFunction

    import tio_megatron.kernels as package

    found = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "triton" in module.name.rsplit(".", 1)[1] and not module.name.endswith(("triton_family", "triton_report")):
            loaded = importlib.import_module(module.name)
            for name, value in vars(loaded).items():
                if isinstance(value, JITFunction) and value.fn.__module__ == module.name:
                    found[f"{module.name.removeprefix('tio_megatron.kernels.')}:{name}"] = value
    return found


@contextmanager
def planted(function: Any, text: str) -> Iterator[None]:
    """Inside, ``function`` is compiled from ``text``, wherever it is called."""
    before = function.src
    _change(function, text)
    try:
        yield
    finally:
        _change(function, before)


def _change(function: Any, text: str) -> None:
    function._unsafe_update_src(text)
    for each in functions().values():  # those that call it remember a hash of its text
        each.hash = None


def approximations(function: Any) -> dict[str, str]:
    """The function's text once for each correctly rounded division and root in it, with a plain one in its place; by words that say which."""
    found = {}
    for number in range(len(_rounded(ast.parse(function.src)))):
        tree = ast.parse(function.src)
        call = _rounded(tree)[number]
        words = f"{KIND[call.func.attr]} {number}"
        found[words] = ast.unparse(_Plain(call).visit(tree))
    return found


def _rounded(tree: ast.AST) -> list[Any]:
    """``tl.div_rn(a, b)`` and ``tl.sqrt_rn(a)``, in an order that is the same each time."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KIND]


class _Plain(ast.NodeTransformer):
    """Writes one of them as ``a / b`` or ``tl.sqrt(a)``."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def visit_Call(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        if node is not self.call:
            return node
        if node.func.attr == "div_rn":
            return ast.BinOp(node.args[0], ast.Div(), node.args[1])
        node.func.attr = "sqrt"
        return node

"""Patches of somebody else's symbols, with undo. Names symbols; holds no arithmetic.

A patch names one symbol as ``package.module:attribute`` or ``package.module:Class.attribute``. Only symbols that are looked up when they
are used are worth patching: class attributes, and module globals read by the functions of that same module. A name that other modules
import by value keeps its old meaning there, so such a name is patched where it is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tio_megatron.integrations.megatron.versions import RELEASES

_ABSENT = object()


class MovedSymbolError(ImportError):
    """A symbol that a patch names is not where it was: another version of the package is installed."""


@dataclass(frozen=True)
class Patch:
    """One replaced symbol.

    Args:
        target: ``module:attribute`` or ``module:Class.attribute``.
        build: given the original (the raw entry of the owner's ``__dict__``, so a staticmethod stays one), returns the replacement.
        why: why this symbol is the place.
        stock: what stays stock around it.
        may_be_absent: the symbol need not exist; undo then deletes it. ``build`` is given ``None``.
        supported: the package and release that has the symbol there.
        binds: packages whose symbol the owner itself binds there, where it finds them: theirs is no patch of somebody's.
    """

    target: str
    build: Callable[[Any], Any]
    why: str
    stock: str = ""
    may_be_absent: bool = False
    supported: str = f"megatron-core {', '.join(RELEASES)}"
    binds: tuple[str, ...] = ()

    def owner(self) -> tuple[Any, str]:
        """The module or class that holds the symbol, and the symbol's last name.

        Raises:
            MovedSymbolError: the module or a class on the way does not exist.
        """
        module_name, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise MovedSymbolError(self._moved(f"no module {error.name}")) from error
        for parent in parents:
            owner = vars(owner).get(parent)
            if owner is None:
                raise MovedSymbolError(self._moved(f"no {parent}"))
        return owner, name

    def _moved(self, what: str) -> str:
        return f"{self.target} is not there ({what}): tio_megatron supports {self.supported}; install such a version"


@dataclass
class _Replaced:
    patch: Patch
    owner: Any
    name: str
    original: Any
    replacement: Any


class Installed:
    """Patches in force; :meth:`undo` puts every original back."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []

    @property
    def targets(self) -> tuple[str, ...]:
        """The symbols replaced, in the order of replacement."""
        return tuple(entry.patch.target for entry in self._replaced)

    def problems(self) -> list[str]:
        """One line for each patch that is not in force in this process; empty when all are."""
        found = []
        for entry in self._replaced:
            now = vars(entry.owner).get(entry.name, _ABSENT)
            if now is not entry.replacement:
                author = author_of(now)
                found.append(f"{entry.patch.target}: replaced by somebody else after tio_megatron" + (f" (its code is {author}'s)" if author else ""))
        return found

    def foreign(self) -> dict[str, str]:
        """Symbols that held somebody else's code before ours, and whose: two plug-ins patch one symbol. What torch put there counts as the owner's."""
        found = {}
        for entry in self._replaced:
            author = "" if entry.original is _ABSENT else author_of(entry.original)
            if author not in ("", "torch", "tio_megatron", "functools", entry.patch.target.partition(":")[0].partition(".")[0], *entry.patch.binds):
                found[entry.patch.target] = author
        return found

    def undo(self) -> None:
        """Restore every symbol, last replaced first. Harmless when called again.

        Raises:
            RuntimeError: somebody has replaced a symbol after us; theirs must be undone first. Nothing is restored then.
        """
        for entry in self._replaced:
            if vars(entry.owner).get(entry.name, _ABSENT) is not entry.replacement:
                raise RuntimeError(f"{entry.patch.target} was replaced by somebody else after tio_megatron; undo that first")
        while self._replaced:
            entry = self._replaced.pop()
            if entry.original is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)


def author_of(value: Any) -> str:
    """The top-level package whose code ``value`` is; of a wrapper, the outermost. Empty when it cannot be told.

    >>> author_of(author_of)
    'tio_megatron'
    """
    code = getattr(value, "__func__", value)
    # functools.wraps copies the module's name of what is wrapped; the code's own globals do not lie.
    names = getattr(code, "__globals__", None)
    module = names.get("__name__") if isinstance(names, dict) else getattr(code, "__module__", None)
    return str(module or "").partition(".")[0]


def install(patches: Iterable[Patch]) -> Installed:
    """Replace every symbol, or none: all symbols are looked up before the first is replaced.

    Raises:
        MovedSymbolError: a symbol is not where the supported version has it.
    """
    found = []
    for patch in patches:
        owner, name = patch.owner()
        original = vars(owner).get(name, _ABSENT)
        if original is _ABSENT and not patch.may_be_absent:
            raise MovedSymbolError(patch._moved(f"no {name}"))
        found.append((patch, owner, name, original))
    built = [_Replaced(patch, owner, name, original, patch.build(None if original is _ABSENT else original)) for patch, owner, name, original in found]
    installed = Installed()
    for entry in built:
        setattr(entry.owner, entry.name, entry.replacement)
        installed._replaced.append(entry)
    return installed

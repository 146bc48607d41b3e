"""Patches of somebody else's symbols, with undo. Names symbols; holds no arithmetic.

A patch names one symbol as ``package.module:attribute`` or ``package.module:Class.attribute``. Only symbols that are looked up when they
are used are worth patching: class attributes, and module globals read by the functions of that same module. A name that other modules
import by value keeps its old meaning there, so such a name is patched where it is read.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tio_megatron.integrations import releases
from tio_megatron.integrations.import_hook import ImportHook

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
        supported: the package and the releases that have the symbol there.
        binds: packages whose symbol the owner itself binds there, where it finds them: theirs is no patch of somebody's.
    """

    target: str
    build: Callable[[Any], Any]
    why: str
    stock: str = ""
    may_be_absent: bool = False
    supported: str = releases.described("megatron-core")
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


class PatchSet:
    """Patches that are on or off together in this process.

    Args:
        patches: makes them, each time they are switched on; or the patches themselves.
        on_import: patches of a module that is not imported yet wait until somebody imports it. Without it their modules are imported.
            Megatron-LM's ``megatron.training``, DeepSpeed and verl are there in some processes alone and take long to import.
    """

    through = "tio_megatron"

    def __init__(self, patches: Callable[[], Iterable[Patch]] | Iterable[Patch], *, on_import: bool = False) -> None:
        self._patches, self._on_import = patches, on_import
        self._replaced: list[_Replaced] = []
        self._hooks: dict[str, ImportHook] = {}
        self.is_on = False
        """Whether the patches are in force, or wait for their modules."""

    @property
    def targets(self) -> tuple[str, ...]:
        """The symbols replaced by now, in the order of replacement."""
        return tuple(entry.patch.target for entry in self._replaced)

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Modules that are not imported yet."""
        return tuple(self._hooks)

    def on(self) -> PatchSet:
        """Put every patch in force, or none: all symbols are looked up before the first is replaced. Harmless when on.

        Raises:
            MovedSymbolError: a symbol is not where the supported release has it. In a module that is imported later the same error ends its import.
        """
        if self.is_on:
            return self
        waiting: dict[str, list[Patch]] = {}
        now = []
        for patch in self._patches() if callable(self._patches) else self._patches:
            module = patch.target.partition(":")[0]
            if self._on_import and module not in sys.modules:
                waiting.setdefault(module, []).append(patch)
            else:
                now.append(patch)
        self._replace(now)
        self._hooks = {module: ImportHook(module, after=functools.partial(self._arrived, module, waiting[module])) for module in waiting}
        self.is_on = True
        return self

    def problems(self) -> list[str]:
        """One line for each patch that went in and is not in force any more; empty when all are."""
        found = []
        for entry in self._replaced:
            now = vars(entry.owner).get(entry.name, _ABSENT)
            if now is not entry.replacement:
                author = author_of(now)
                found.append(f"{entry.patch.target}: replaced by somebody else after tio_megatron" + (f" (its code is {author}'s)" if author else ""))
        return found

    def shared(self) -> dict[str, str]:
        """Symbols that held somebody else's code before ours, and whose: two plug-ins patch one symbol. What torch put there counts as the owner's."""
        found = {}
        for entry in self._replaced:
            author = "" if entry.original is _ABSENT else author_of(entry.original)
            if author not in ("", "torch", "tio_megatron", "functools", entry.patch.target.partition(":")[0].partition(".")[0], *entry.patch.binds):
                found[entry.patch.target] = author
        return found

    def undo(self) -> None:
        """Restore every symbol, last replaced first, and wait no longer. Harmless when off.

        Raises:
            RuntimeError: somebody has replaced a symbol after us; theirs must be undone first. Nothing is restored then.
        """
        for entry in self._replaced:
            if vars(entry.owner).get(entry.name, _ABSENT) is not entry.replacement:
                raise RuntimeError(f"{entry.patch.target} was replaced by somebody else after tio_megatron; undo that first")
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        while self._replaced:
            entry = self._replaced.pop()
            if entry.original is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)
        self.is_on = False

    def _arrived(self, module: str, patches: Sequence[Patch]) -> None:
        del self._hooks[module]
        self._replace(patches)

    def _replace(self, patches: Iterable[Patch]) -> None:
        found = []
        for patch in patches:
            owner, name = patch.owner()
            original = vars(owner).get(name, _ABSENT)
            if original is _ABSENT and not patch.may_be_absent:
                raise MovedSymbolError(patch._moved(f"no {name}"))
            found.append((patch, owner, name, original))
        built = [_Replaced(patch, owner, name, original, patch.build(None if original is _ABSENT else original)) for patch, owner, name, original in found]
        for entry in built:
            setattr(entry.owner, entry.name, entry.replacement)
            self._replaced.append(entry)


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

"""Calls around the first import of a module that somebody else will import. Imports nothing by itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Call = Callable[[], None]


def nothing() -> None:
    """For a hook that has nothing to do on one side of the import."""


class ImportHook(importlib.abc.MetaPathFinder):
    """Waits for ``module``; calls ``before`` and ``after`` around its execution, once.

    ``failed`` is called in place of ``after`` when the import ends in an error; the module is not there then.
    """

    def __init__(self, module: str, after: Call, before: Call = nothing, failed: Call = nothing) -> None:
        self.module = module
        self.before, self.after, self.failed = before, after, failed
        self._asking = False
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Wait no longer. Harmless when called again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with our loader around its own."""
        if self._asking or name != self.module:
            return None
        # Another finder that waits for the same module asks everybody too, and so this one again.
        self._asking = True
        try:
            found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader, between the calls of a hook."""

    def __init__(self, loader: importlib.abc.Loader, hook: ImportHook) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if self._hook not in sys.meta_path:  # removed between the search and the import
            self._loader.exec_module(module)
            return
        self._hook.before()
        try:
            self._loader.exec_module(module)
        except BaseException:
            sys.modules.pop(module.__name__, None)
            self._hook.failed()
            raise
        self._hook.remove()
        self._hook.after()

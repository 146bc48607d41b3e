"""MindSpeed imported after :func:`tio_megatron.apply`: our patches make room while it patches, and go in again through its manager.

verl imports ``tio_megatron.auto`` when it is itself imported, and MindSpeed's adaptor only in the workers. So while a contract is in force without
MindSpeed, one finder waits for that adaptor; it imports nothing by itself and goes away when it has been used or the contract is undone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from tio_megatron.integrations.mindspeed import manager

Call = Callable[[], None]


class _Loader(importlib.abc.Loader):
    """MindSpeed's own loader, between ``before`` and ``after``."""

    def __init__(self, loader: importlib.abc.Loader, before: Call, after: Call) -> None:
        self._loader, self._before, self._after = loader, before, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._before()
        try:
            self._loader.exec_module(module)
        except BaseException:
            # The module is not there then, and our patches go in as if nobody had asked for it.
            sys.modules.pop(module.__name__, None)
            raise
        finally:
            self._after()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, before: Call, after: Call) -> None:
        self._before, self._after = before, after

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != manager.ADAPTOR:
            return None
        leave()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._before, self._after)
        return spec


_finder: _Finder | None = None


def watch(before: Call, after: Call) -> None:
    """Call ``before`` and ``after`` around the import of MindSpeed's adaptor, if it is installed and not imported yet."""
    global _finder
    leave()
    if not manager.present() and importlib.util.find_spec("mindspeed") is not None:
        _finder = _Finder(before, after)
        sys.meta_path.insert(0, _finder)


def leave() -> None:
    """Watch no longer."""
    global _finder
    if _finder is not None and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder = None

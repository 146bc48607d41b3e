"""Patches of modules that may not be imported yet: each goes in as soon as its module has run. Imports nothing by itself.

Megatron-LM's ``megatron.training`` is there in its own scripts alone and takes long to import; a process that only has megatron-core must
not pay for it, and must not fail without it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

from tio_megatron.integrations.patching import Installed, Patch, install


class LatePatches:
    """Patches in force, or waiting for their module; :meth:`undo` puts every original back and waits no longer."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        """
        Raises:
            MovedSymbolError: a module that is imported already has no such symbol. Nothing is replaced then. In a module that comes later
                the same error ends its import.
        """
        self._waiting: dict[str, list[Patch]] = {}
        now = []
        for patch in patches:
            module = patch.target.partition(":")[0]
            if module in sys.modules:
                now.append(patch)
            else:
                self._waiting.setdefault(module, []).append(patch)
        self._installed: list[Installed] = [install(now)]
        self._finder = _Finder(self)
        sys.meta_path.insert(0, self._finder)

    @property
    def targets(self) -> tuple[str, ...]:
        """The symbols replaced by now."""
        return tuple(target for installed in self._installed for target in installed.targets)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The symbols whose module is not imported yet."""
        return tuple(patch.target for patches in self._waiting.values() for patch in patches)

    def problems(self) -> list[str]:
        """One line for each patch that went in and is not in force any more."""
        return [line for installed in self._installed for line in installed.problems()]

    def foreign(self) -> dict[str, str]:
        """Symbols that held somebody else's code before ours, and whose."""
        return {symbol: other for installed in self._installed for symbol, other in installed.foreign().items()}

    def waits_for(self, module: str) -> bool:
        """Whether patches go into ``module`` when it is imported."""
        return module in self._waiting

    def arrived(self, module: str) -> None:
        """``module`` has run: its patches go in."""
        self._installed.append(install(self._waiting.pop(module)))

    def undo(self) -> None:
        """Restore every symbol. Harmless when called again.

        Raises:
            RuntimeError: somebody has replaced a symbol after us.
        """
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._waiting.clear()
        while self._installed:
            self._installed[-1].undo()
            self._installed.pop()


class Switch:
    """Late patches that are on or off in this process. ``patches`` makes them, each time they are switched on."""

    def __init__(self, patches: Callable[[], Iterable[Patch]]) -> None:
        self._patches = patches
        self._late: LatePatches | None = None

    @property
    def is_on(self) -> bool:
        """Whether they are in force, or wait for their modules."""
        return self._late is not None

    def on(self) -> None:
        """Harmless when on.

        Raises:
            MovedSymbolError: as :class:`LatePatches`.
        """
        if self._late is None:
            self._late = LatePatches(self._patches())

    def off(self) -> None:
        """Restore every symbol. Harmless when off.

        Raises:
            RuntimeError: somebody has replaced a symbol after us.
        """
        if self._late is not None:
            self._late.undo()
            self._late = None

    def problems(self) -> list[str]:
        """One line for each patch that went in and is not in force any more."""
        return self._late.problems() if self._late is not None else []


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, late: LatePatches) -> None:
        self._late = late
        self._asking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if self._asking or not self._late.waits_for(name):
            return None
        # Another finder that waits for the same module asks everybody too, and so this one again.
        self._asking = True
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._late)
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader; afterwards the patches go in."""

    def __init__(self, loader: importlib.abc.Loader, late: LatePatches) -> None:
        self._loader, self._late = loader, late

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._late.waits_for(module.__name__):
            self._late.arrived(module.__name__)

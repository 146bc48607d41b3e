"""Our patches through MindSpeed's manager: installed, removed, installed again after ``repatch``, and looked up symbol by symbol.

Functions and methods go through the manager, as wrappers, so that they stack on whatever MindSpeed puts there instead of colliding with it.
Constants and classes are replaced where they are read, as without MindSpeed: the manager finds aliases by identity, and True or torch's AdamW
are bound in modules that have nothing to do with us.

The manager forgets all wrappers when verl calls ``repatch``. So a feature of ours stands last in MindSpeed's list of features: ``repatch`` asks
it like any other, after all others, and our wrappers are outermost again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tio_megatron.integrations.mindspeed import manager
from tio_megatron.integrations.mindspeed.aliases import ABSENT, Snapshot, bare
from tio_megatron.integrations.patching import MovedSymbolError, Patch, PatchSet

NAME = "tio_megatron_wrapper"
"""Of each of our wrappers: by its last word the manager knows a wrapper from a replacement."""


class _Managed:
    """One symbol that goes through the manager."""

    def __init__(self, patch: Patch, owner: Any, name: str) -> None:
        self.patch, self.owner, self.name = patch, owner, name
        self.before = Snapshot(owner, name)
        self.path = _path(owner, name, self.before.value)
        self.created = self.path not in manager.manager().patches_info
        self.made: dict[int, Any] = {}
        self.wrapped: Any = ABSENT
        self.times = 0
        self.wrapper = self._wrapper()

    def _wrapper(self) -> Callable[[Any], Any]:
        static = isinstance(self.before.places[0].raw, staticmethod)

        def wrapper(function: Any) -> Any:
            # The manager compares what it finds by getattr, so a static method is handed over as its function.
            replacement = bare(self.patch.build(staticmethod(function) if static else function))
            self.wrapped, self.times = function, self.times + 1
            self.made[id(replacement)] = replacement
            return replacement

        wrapper.__name__ = wrapper.__qualname__ = NAME
        return wrapper

    @property
    def entry(self) -> Any:
        return manager.manager().patches_info.get(self.path)

    def give_back(self) -> None:
        """Let MindSpeed's own modules keep MindSpeed's own replacement.

        Writing ours over what is there, the manager also finds the module that MindSpeed's replacement comes from. Left so, the next ``repatch`` would
        import ours from there, register it as MindSpeed's, and never get rid of it again.
        """
        if self.entry.orig_func is not self.before.value:
            for place in self.before.places:
                if "mindspeed" in getattr(place.holder, "__name__", ""):
                    setattr(place.holder, place.name, place.raw)

    def problem(self) -> str | None:
        """Why the patch is not in force, or None."""
        entry, now = self.entry, bare(vars(self.owner).get(self.name, ABSENT))
        if entry is None or self.wrapper not in entry.wrappers:
            return f"{self.patch.target}: gone from MindSpeed's manager ({_called(now)} is there now); it was patched again without tio_megatron's feature"
        if not entry.is_applied or id(entry.final_patch_func) not in self.made:
            later = [_called(wrapper) for wrapper in entry.wrappers[entry.wrappers.index(self.wrapper) + 1 :]]
            return f"{self.patch.target}: {', '.join(later) or 'a patch'} was registered after it, and may pass it by; apply tio_megatron's patches last"
        if now is not entry.final_patch_func:
            return f"{self.patch.target}: replaced outside MindSpeed's manager by {_called(now)}"
        return None

    def undo(self) -> None:
        """Take the wrapper out of the manager, and put back what was there; after a ``repatch``, what would be there without us."""
        entry, rebuilt = self.entry, self.times > 1
        value = self.before.value if not rebuilt else self.wrapped
        if entry is not None and self.wrapper in entry.wrappers:
            entry.wrappers.remove(self.wrapper)
            entry.final_patch_func = value
            if self.created and entry.patch_func is None and not entry.wrappers:
                del manager.manager().patches_info[self.path]
        self.before.restore(self.made, value if rebuilt else ABSENT)
        self.made.clear()


class _Feature:
    """What MindSpeed asks of a feature. Last in its list; see :mod:`.install`."""

    feature_name, optimization_level, default_patches = "tio_megatron", 0, True

    def __init__(self, managed: list[_Managed]) -> None:
        self._managed = managed

    def is_need_apply(self, args: Any) -> bool:
        return True

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        for one in self._managed:
            patch_manager.register_patch(one.path, one.wrapper)

    def _nothing(self, *args: Any) -> None:
        pass

    register_args = pre_validate_args = validate_args = post_validate_args = pre_register_patches = _nothing


class ThroughMindSpeed:
    """Patches in force under MindSpeed; the counterpart of :class:`tio_megatron.integrations.patching.PatchSet`."""

    through = "MindSpeed's patch manager"

    def __init__(self, managed: list[_Managed], direct: PatchSet) -> None:
        self._managed, self._direct = managed, direct
        self._feature = _Feature(managed)
        self._in_force = True
        manager.features().append(self._feature)
        self._feature.register_patches(manager.manager(), None)
        manager.manager().apply_patches()
        for one in managed:
            one.give_back()

    @property
    def targets(self) -> tuple[str, ...]:
        """The symbols replaced."""
        return (*(one.patch.target for one in self._managed), *self._direct.targets)

    def problems(self) -> list[str]:
        """One line for each of our patches that is not in force in this process, or that somebody wraps; empty when all is well."""
        found = [line for one in self._managed if (line := one.problem())] + self._direct.problems()
        if not any(feature is self._feature for feature in manager.features()):
            found.append("tio_megatron's feature is gone from MindSpeed's list: the next repatch() will drop our patches; undo() and apply() again")
        return found

    def shared(self) -> dict[str, str]:
        """Symbols that MindSpeed patches too, and what lies under our wrapper there."""
        found = {}
        for one in self._managed:
            entry = one.entry
            if entry is not None and (entry.patch_func is not None or len(entry.wrappers) > 1):
                others = [_called(wrapper) for wrapper in entry.wrappers if wrapper is not one.wrapper]
                found[one.patch.target] = ", ".join([*([_called(entry.patch_func)] if entry.patch_func is not None else []), *others])
        return found

    def undo(self) -> None:
        """Take our patches out of the manager and restore every alias. Harmless when called again.

        Raises:
            RuntimeError: somebody has replaced a symbol after us; theirs must be undone first. Nothing is restored then.
        """
        if not self._in_force:
            return
        for one in self._managed:
            entry = one.entry
            if entry is not None and one.wrapper in entry.wrappers and (line := one.problem()):
                raise RuntimeError(f"{line}; undo that first")
        self._direct.undo()
        self._in_force = False
        features = manager.features()
        features[:] = [feature for feature in features if feature is not self._feature]
        for one in reversed(self._managed):
            one.undo()


def install(patches: Iterable[Patch]) -> ThroughMindSpeed:
    """Put ``patches`` in force through MindSpeed's manager, or none of them.

    Raises:
        MovedSymbolError: a symbol is not where the supported version has it. The manager itself would make it up.
    """
    managed: dict[tuple[str, Any], _Managed] = {}
    direct = []
    for patch in patches:
        owner, name = patch.owner()
        value = vars(owner).get(name, ABSENT)
        if value is ABSENT and not patch.may_be_absent:
            raise MovedSymbolError(patch._moved(f"no {name}"))
        if not inspect.isroutine(bare(value)):
            direct.append(patch)
            continue
        one = _Managed(patch, owner, name)
        # A function patched where it lives and where it is read is one symbol to the manager.
        managed.setdefault((one.path, patch.build), one)
    return ThroughMindSpeed(list(managed.values()), PatchSet(direct).on())


def _path(owner: Any, name: str, value: Any) -> str:
    """Under which name the manager shall know the symbol: the one it has for it already, or that of its home.

    An alias of a function is no symbol of its own: two entries would rewrite each other's aliases, and removing them would not give back
    what was there.
    """
    for path, entry in manager.manager().patches_info.items():
        if entry.orig_func_name != name:
            continue
        if entry.orig_module is owner or (not isinstance(owner, type) and (entry.final_patch_func is value or entry.orig_func is value)):
            return str(path)
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    if home is not None and vars(home).get(name) is value:
        return f"{home.__name__}.{name}"
    return f"{owner.__name__}.{name}"


def _called(thing: Any) -> str:
    if thing is ABSENT:
        return "nothing"
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"

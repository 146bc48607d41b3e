"""Where one object is bound in this process: the modules that MindSpeed's manager rewrites when it patches a symbol. Looks; restores; no patches."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

ABSENT = object()


def bare(value: Any) -> Any:
    """A static or class method's function; anything else as it is."""
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


@dataclass(frozen=True)
class Place:
    """``vars(holder)[name]`` was ``raw``."""

    holder: Any
    name: str
    raw: Any


class Snapshot:
    """Everywhere that ``name`` is bound to the object that ``owner`` has under it.

    Args:
        owner: a module or a class.
        name: of the symbol there. Modules that hold the same object under another name are nobody's business: the manager leaves them alone.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.name, self.value = name, bare(vars(owner)[name])
        self.places = [Place(owner, name, vars(owner)[name])]
        self.places += [Place(module, name, raw) for module, raw in bindings(name) if module is not owner and bare(raw) is self.value]
        self._known = frozenset(sys.modules)

    def restore(self, ours: Collection[int], instead: Any = ABSENT) -> None:
        """Put back what was there, wherever one of the objects with an ``id`` in ``ours`` is bound now.

        A module that had the name only since gets the object too if it was imported since, and loses the name if it was not.

        Args:
            ours: ids of the replacements.
            instead: the object to put there if what was there is out of date; static methods stay static.
        """
        value = self.value if instead is ABSENT else instead
        for place in self.places:
            if id(bare(vars(place.holder).get(self.name, ABSENT))) in ours:
                raw = place.raw if value is self.value else type(place.raw)(value) if isinstance(place.raw, (staticmethod, classmethod)) else value
                setattr(place.holder, self.name, raw)
        for module, raw in bindings(self.name):
            if id(bare(raw)) in ours:
                if module.__name__ in self._known:
                    delattr(module, self.name)
                else:
                    setattr(module, self.name, value)


def bindings(name: str) -> list[tuple[Any, Any]]:
    """Every module that has ``name`` in its own dictionary, and the object."""
    found = []
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and name in namespace:
            found.append((module, namespace[name]))
    return found

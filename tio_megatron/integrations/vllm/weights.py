"""One copy of every weight: packed while the engine serves, raw only while something is loaded into it.

Every way to load weights ends in a parameter's ``weight_loader`` (the first load, ``reload_weights``, a weight transfer engine, verl's
buckets through ``load_weights``), so that is the place. Ours rebuilds the raw weight from the packed one before the stock loader writes
its part; the ledger packs it again, into the same storage, when the load is over or too many bytes are raw. So any subset of names may
come in any order, nothing packed is stale, and a write that passes by the loaders fails: between loads the parameter is empty.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from typing import Any

import torch

RAW_BUDGET = 256 << 20
"""Bytes that may be raw at a time (one layer may exceed it alone)."""


class Ledger:
    """What one model's layers share: which are raw, how many loads there were, and whether the weights are whole.

    ``version`` counts the loads after the model first ran; keys and values computed before the last of them are stale (:mod:`.refusing`).
    ``failed`` says that a load or an update ended half-way, ``updating`` that one is not finished: the model does not run meanwhile. Every
    tensor loaded again, in any number of loads, mends ``failed``.
    """

    def __init__(self) -> None:
        self.version = 0
        self.failed: str | None = None
        self.updating: str | None = None
        self._touched = False
        self._arrived: set[str] = set()
        self._raw: dict[int, weakref.ref[OneCopy]] = {}
        self._layers: list[weakref.ref[OneCopy]] = []
        self.served = False

    def add(self, layer: OneCopy) -> None:
        """Count ``layer`` among the model's layers."""
        self._layers.append(weakref.ref(layer))

    def layers(self) -> list[OneCopy]:
        """Every layer that holds a packed weight."""
        return [layer for ref in self._layers if (layer := ref()) is not None]

    def stopped(self) -> str | None:
        """Why the model must not run, if it must not."""
        return self.failed or self.updating

    def begin(self) -> None:
        """A weight update starts."""
        self.updating, self._touched = "a weight update was started and not finished", False

    def loading(self) -> None:
        """A load starts."""
        self._touched = True
        if self.served:
            self.version += 1

    def arrive(self, names: set[str], all_names: Set[str]) -> None:
        """``names`` were loaded whole."""
        if self.failed:
            self._arrived |= names
            if self._arrived >= all_names:
                self.failed = None

    def fail(self, why: str) -> None:
        """A load ended half-way."""
        self.failed = f"{why}; load all of them again"
        self._arrived.clear()

    def abort(self) -> None:
        """A weight update is given up: if nothing had been loaded yet, the older weights are whole and stay in force."""
        if self.updating and self._touched:
            self.fail("an update of the weights was aborted")
        self.updating = None

    def opened(self, layer: OneCopy) -> None:
        """``layer`` holds a raw weight now; packs the layer opened longest ago while too many bytes are raw."""
        self._raw.pop(id(layer), None)
        self._raw[id(layer)] = weakref.ref(layer)
        while len(self._raw) > 1 and sum(held.raw_bytes() for ref in self._raw.values() if (held := ref()) is not None) > RAW_BUDGET:
            oldest = self._raw.pop(next(iter(self._raw)))()
            if oldest is not None:
                oldest.seal()

    def is_open(self) -> bool:
        """Whether any layer is raw."""
        return bool(self._raw)

    def close(self) -> None:
        """Pack every raw layer."""
        while self._raw:
            layer = self._raw.popitem()[1]()
            if layer is not None:
                layer.seal()

    def report(self) -> dict[str, int]:
        """Bytes held: ``packed``, and ``raw`` (0 between loads)."""
        layers = self.layers()
        return {"packed": sum(layer.packed_bytes() for layer in layers), "raw": sum(layer.raw_bytes() for layer in layers)}


Stock: Any = object
"""The base of a mixin that stands before a class of vLLM: whose attributes it uses, and which carries no types."""


class OneCopy(Stock):
    """Mixin before a stock layer class: its weights become packed ones.

    The layer calls :meth:`keep_packed` once for each parameter after the stock constructor.
    """

    ledger: Ledger

    def keep_packed(self, name: str, attribute: str, pack: Callable[[torch.Tensor], Any], ledger: Ledger) -> None:
        """Hold parameter ``name`` as ``self.<attribute>``: ``pack`` makes it, its ``update_`` and ``unpack`` keep it."""
        if "slots" not in self.__dict__:
            self.slots: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {}
            self.ledger = ledger
            ledger.add(self)
        self.slots[name] = (attribute, pack)
        setattr(self, attribute, None)

    def weight_loader(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The stock loader, on a raw weight."""
        self._open(param)
        return super().weight_loader(param, loaded_weight, *args, **kwargs)

    def weight_loader_v2(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The stock loader, on a raw weight."""
        self._open(param)
        return super().weight_loader_v2(param, loaded_weight, *args, **kwargs)

    def _open(self, param: torch.nn.Parameter) -> None:
        # vLLM's layerwise reload first calls a loader on the meta device, to count what it would write.
        if param.is_meta or "slots" not in self.__dict__:
            return
        for name, (attribute, _) in self.slots.items():
            held, packed = getattr(self, name), getattr(self, attribute)
            if packed is None or self.__dict__.get(f"_raw_{name}") == id(held):
                continue
            if held is param and held.numel() == 0:
                held.data = packed.unpack()
            elif held.numel():
                # A layerwise reload has made fresh, unfilled parameters; what is not loaded keeps its old value.
                packed.unpack(out=held.data)
            else:
                continue
            self.__dict__[f"_raw_{name}"] = id(held)
            self.ledger.opened(self)

    def seal(self) -> None:
        """Pack whatever is raw, into the storage already there, and free the raw weight."""
        for name, (attribute, pack) in self.__dict__.get("slots", {}).items():
            param = getattr(self, name)
            if param.is_meta or param.numel() == 0:
                continue
            packed = getattr(self, attribute)
            if packed is None:
                setattr(self, attribute, pack(param.data))
            else:
                packed.update_(param.data)
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)
            self.__dict__.pop(f"_raw_{name}", None)

    def packed_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(packed.nbytes for attribute, _ in self.slots.values() if (packed := getattr(self, attribute)) is not None)

    def raw_bytes(self) -> int:
        """Bytes of raw weights beside them."""
        return sum(getattr(self, name).nbytes for name in self.slots if not getattr(self, name).is_meta)

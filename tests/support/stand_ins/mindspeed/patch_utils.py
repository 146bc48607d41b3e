"""The patch manager."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar

STACKING = ("wrapper", "decorator")


def _stacks(function: Any) -> bool:
    return getattr(function, "__name__", "").endswith(STACKING)


class _Entry:
    """All patches of one symbol."""

    def __init__(self, path: str) -> None:
        self.orig_module_name, _, self.orig_func_name = path.rpartition(".")
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Callable[[Any], Any]] = []
        self.is_applied = False

    def add(self, function: Any, force: bool) -> None:
        if _stacks(function):
            if function not in self.wrappers:
                self.wrappers.append(function)
        elif self.patch_func and not force:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = function
        self.is_applied = False

    def apply(self) -> None:
        if self.is_applied:
            return
        holder, now = self._find()
        if self.orig_module is None:
            self.orig_module, self.orig_func = holder, now
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.orig_module, self.orig_func_name, final)
        for module in list(sys.modules.values()):
            if getattr(module, self.orig_func_name, None) is now and hasattr(module, self.orig_func_name):
                setattr(module, self.orig_func_name, final)
        self.final_patch_func, self.is_applied = final, True

    def remove(self) -> None:
        for name, module in list(sys.modules.items()):
            if "mindspeed" in name or name == "torch.classes":
                continue
            holder = module
            if inspect.isclass(self.orig_module):
                holder = getattr(module, self.orig_module_name.rpartition(".")[2], module)
            if hasattr(holder, self.orig_func_name) and getattr(holder, self.orig_func_name) is self.final_patch_func:
                setattr(holder, self.orig_func_name, self.orig_func)
        self.patch_func, self.final_patch_func, self.is_applied = None, None, False
        self.wrappers.clear()

    def _find(self) -> tuple[Any, Any]:
        parts = self.orig_module_name.split(".")
        for count in range(len(parts), 0, -1):
            try:
                holder: Any = importlib.import_module(".".join(parts[:count]))
            except ModuleNotFoundError:
                continue
            for part in parts[count:]:
                holder = getattr(holder, part)
            if not hasattr(holder, self.orig_func_name):
                setattr(holder, self.orig_func_name, None)
            return holder, getattr(holder, self.orig_func_name)
        raise ModuleNotFoundError(self.orig_module_name)


class MindSpeedPatchesManager:
    """Patches by path, in the order of their first registration."""

    patches_info: ClassVar[dict[str, _Entry]] = {}

    @staticmethod
    def register_patch(orig_func_name: str, new_func: Any = None, force_patch: bool = False, create_dummy: bool = False) -> None:
        if orig_func_name not in MindSpeedPatchesManager.patches_info:
            MindSpeedPatchesManager.patches_info[orig_func_name] = _Entry(orig_func_name)
        MindSpeedPatchesManager.patches_info[orig_func_name].add(new_func, force_patch)

    @staticmethod
    def apply_patches() -> None:
        for entry in MindSpeedPatchesManager.patches_info.values():
            entry.apply()

    @staticmethod
    def remove_patches() -> None:
        for entry in MindSpeedPatchesManager.patches_info.values():
            entry.remove()

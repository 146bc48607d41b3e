"""megatron-core under MindSpeed: our patches through its patch manager, its options sorted, its replaced classes recognised. No arithmetic lives here.

Importing this package imports nothing of MindSpeed; :func:`present` says whether this process has done so. What its modules need of MindSpeed
is named in :mod:`.manager` alone.
"""

from __future__ import annotations

from tio_megatron.integrations.mindspeed.manager import present

__all__ = ["present"]

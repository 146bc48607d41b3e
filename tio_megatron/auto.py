"""``import tio_megatron.auto`` applies the contract that ``TIO_CONTRACT`` names, for configurations that can only name a module to import.

``1`` or ``default`` is the default contract; otherwise a JSON object or the path of a JSON file, which may hold ``vocab_size``. Unset, empty
or ``0``: nothing is applied.
"""

from __future__ import annotations

import tio_megatron
from tio_megatron.contract.environment import from_environment

setting = from_environment()
"""What was applied, or ``None``."""

if setting is not None:
    tio_megatron.apply(setting.contract, vocab_size=setting.vocab_size)

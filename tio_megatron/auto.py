"""``import tio_megatron.auto`` applies the contract that ``TIO_CONTRACT`` names, for configurations that can only name a module to import.

``1`` or ``default`` is the default contract; otherwise a JSON object or the path of a JSON file, which may hold ``vocab_size``. Unset, empty
or ``0``: nothing is applied, unless ``TIO_MEGATRON=1`` asks for the default contract. In Megatron-LM's scripts the ``--tio-*`` arguments of
the command line go before the variables. In verl (``VERL_USE_EXTERNAL_MODULES=tio_megatron.auto``) models are built of local layers, and
trainer and rollout meet before weights are pushed.
"""

from __future__ import annotations

import sys

from tio_megatron.integrations.megatron_lm.start import switch_on

setting = switch_on(sys.argv[1:])
"""What was applied, or ``None``."""

if setting is not None and "verl" in sys.modules:
    from tio_megatron.integrations.verl import both_sides, local_layers

    local_layers.enable()
    both_sides.enable()

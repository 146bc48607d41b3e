"""Whether the contract is in force in every rank of a DeepSpeed job: asked when an engine is built."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from tio_megatron import kernels
from tio_megatron.integrations import handshake
from tio_megatron.integrations.deepspeed.state import session

logger = logging.getLogger(__name__)

_WORKS = "apply tio_megatron last (import tio_megatron.auto after the other package), or take the other patch out"


def this_worker() -> dict[str, Any]:
    """What this rank runs; see :func:`.handshake.record`."""
    from tio_megatron.integrations.megatron.applied.state import patched, problems

    how, setting = patched(), session()
    version = "none" if setting is None else kernels.version(setting.contract.family)
    return handshake.record(
        "deepspeed",
        contract="none" if setting is None else setting.contract.fingerprint(version),
        kernels=version,
        symbols=[name for name in how["symbols"] if name.startswith("deepspeed.")],
        problems=[f"{line}; {_WORKS}" for line in problems() if line.startswith("deepspeed.")],
        shared={name: other for name, other in how["shared"].items() if name.startswith("deepspeed.")},
    )


def meet() -> None:
    """All ranks of the world have the plug-in, the same one, and their patches in force; what another package patches too is told.

    Raises:
        ValueError: in every rank that is here; names who is not, and what to change.
    """
    mine = this_worker()
    for symbol, other in mine["shared"].items():
        logger.warning(
            "%s is %s's, and tio_megatron patches it too: ours is in force, and what %s does there may not happen. Take that patch out", symbol, other, other
        )
    handshake.meet(mine, range(dist.get_world_size()) if dist.is_initialized() else [0])

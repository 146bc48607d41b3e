"""Whether the contract is in force in every rank of a job: asked when a model is built, and whenever somebody wants to know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from tio_megatron import kernels
from tio_megatron.integrations import handshake, handshake_files
from tio_megatron.integrations.megatron.applied import state

GROUPS = ("tp", "cp", "pp", "ep", "expt_tp", "tp_ep", "dp", "dp_cp", "expt_dp")
"""Of megatron-core's collection of process groups: who shares a sum or a message with this rank."""

_WORKS = "apply tio_megatron last (import tio_megatron.auto after the other package), or take the other patch out"


def this_worker() -> dict[str, Any]:
    """What this rank runs: pid, host, versions, contract, symbols that are patched, and problems. See :func:`.handshake.record`."""
    how, session = state.patched(), state.session()
    version = "none" if session is None else kernels.version(session.contract.family)
    return handshake.record(
        "megatron-core",
        contract="none" if session is None else session.contract.fingerprint(version),
        kernels=version,
        vocab_size=None if session is None else session.vocab_size,
        symbols=[name for name in how["symbols"] if not name.startswith("deepspeed.")],
        problems=[f"{line}; {_WORKS}" for line in state.problems()],
        through=str(how["through"]),
        shared=how["shared"],
    )


def all_workers(group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """:func:`this_worker` of every rank of ``group`` (None: the world), on each of them. A collective, which a rank without the plug-in can join."""
    mine = this_worker()
    if not dist.is_initialized():
        handshake_files.leave(mine, [0])
        return [mine]
    handshake_files.leave(mine, dist.get_process_group_ranks(group) if group is not None else range(dist.get_world_size()))
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def meet(pg_collection: Any = None) -> None:
    """Before a model is built: all ranks of its groups have the plug-in, the same one, and their patches in force.

    Raises:
        ValueError: in every rank that is here; names who is not, and what to change.
    """
    handshake.meet(this_worker(), sorted(_ranks(pg_collection)))


def _ranks(pg_collection: Any) -> Iterable[int]:
    if not dist.is_initialized():
        return {0}
    if pg_collection is None:
        # megatron-core's own groups cover the world
        return range(dist.get_world_size()) if parallel_state.is_initialized() else {dist.get_rank()}
    found = {dist.get_rank()}
    for name in GROUPS:
        group = getattr(pg_collection, name, None)
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            found.update(dist.get_process_group_ranks(group))
    return found

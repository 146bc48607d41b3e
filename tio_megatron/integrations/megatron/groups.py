"""Process groups, as each release of megatron-core hands them to its modules (:mod:`.versions`). Names groups; moves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, process_groups_config
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch.distributed import ProcessGroup

from tio_megatron.integrations.megatron.versions import release


@dataclass(frozen=True)
class Groups:
    """The groups of ``parallel_state``, by the names of later releases' collections; for releases that have no collection."""

    tp: ProcessGroup
    pp: ProcessGroup
    cp: ProcessGroup
    tp_cp: ProcessGroup
    ep: ProcessGroup
    expt_tp: ProcessGroup
    expt_dp: ProcessGroup
    tp_ep: ProcessGroup


def default() -> Any:
    """This process's groups: the release's own collection, or :class:`Groups`."""
    name = release().collection
    if name is not None:
        return getattr(process_groups_config, name).use_mpu_process_groups()
    return Groups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        tp_cp=parallel_state.get_tensor_and_context_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        expt_tp=parallel_state.get_expert_tensor_parallel_group(),
        expt_dp=parallel_state.get_expert_data_parallel_group(),
        tp_ep=parallel_state.get_expert_tensor_and_model_parallel_group(),
    )


def passed(arguments: Mapping[str, Any]) -> Any | None:
    """The groups among the keyword ``arguments`` of a module, if any."""
    name = release().groups
    return None if name is None else arguments.get(name)


def given(arguments: Mapping[str, Any]) -> Any:
    """The groups among the keyword ``arguments`` of a module, or the :func:`default` where there are none."""
    found = passed(arguments)
    return default() if found is None else found


def as_keyword(groups: Any) -> dict[str, Any]:
    """``groups`` as a module of this release takes them: one keyword, or none."""
    name = release().groups
    return {} if name is None else {name: groups}


def keep_tensor_group(module: Any) -> None:
    """Give a stock ``module`` its tensor-parallel group, where this release leaves it to ``parallel_state``."""
    if release().groups is None:
        module.tp_group = parallel_state.get_tensor_model_parallel_group()


def gathered(columns: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Megatron's gather of the last axis over tensor-parallel ranks."""
    return gather_from_tensor_model_parallel_region(columns, **({} if release().groups is None else {"group": group}))

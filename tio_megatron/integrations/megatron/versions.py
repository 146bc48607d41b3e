"""What differs between the releases of megatron-core that :func:`tio_megatron.apply` takes. Names only; imports none of them.

A release is a row of :data:`RELEASES`; :mod:`tio_megatron.integrations.releases` holds which are supported.
Whoever needs something that moved asks :func:`release` for it; nothing is found out by trying.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tio_megatron.integrations import releases

FULL = "0.16.1"
"""The megatron-core release under which everything works: training, optimizer, checkpoints. The other rows score."""


@dataclass(frozen=True)
class Release:
    """How one release of megatron-core differs.

    Args:
        version: as its package names it.
        groups: the keyword by which its modules take process groups; ``None`` where they ask ``parallel_state`` themselves.
        collection: the class in ``process_groups_config`` that collects them; ``None`` where there is none.
        stages: what its counting of a stage's layers takes, besides the configuration.
        router_in_spec: an expert layer's spec names its router.
        gate_in_spec: the spec of shared experts says whether they have a gate; else the expert layer does.
        mlp_is_called: a layer calls its spec's MLP, with groups and all; else it builds a ``ModuleSpec`` and looks at its class.
        padding_mask: ``GPTModel.forward`` takes one.
        wants_slices: TP with EP must have sequence parallelism, also to score (stock's own check; in 0.15 it dies of a missing import).
        legacy_experts: there is ``GroupedMLP``.
        new_options: fields of ``TransformerConfig`` that :data:`FULL` does not have, so no list of refusals knows: they must stay off.
    """

    version: str
    groups: str | None = "pg_collection"
    collection: str | None = "ProcessGroupCollection"
    stages: tuple[str, ...] = ("vp_stage", "pp_rank")
    router_in_spec: bool = True
    gate_in_spec: bool = False
    mlp_is_called: bool = False
    padding_mask: bool = True
    wants_slices: bool = False
    legacy_experts: bool = True
    new_options: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether gradients, the optimizer and training checkpoints are under the contract; else it scores only."""
        return self.version == FULL


_OLD: dict[str, Any] = {"router_in_spec": False, "gate_in_spec": True, "padding_mask": False, "wants_slices": True}
_OPTIONS_17 = (
    "use_mup",
    "fused_residual_rmsnorm",
    "mtp_use_repeated_layer",
    "mtp_hybrid_override_pattern",
    "moe_router_force_biased",
    "moe_pad_experts_for_cuda_graph_inference",
    "nccl_all_reduce_for_prefill",
)
_OPTIONS_19 = (
    *_OPTIONS_17,
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
    "moe_grad_scale_func",
    "mtp_grad_scale_func",
    "overlap_dispatch_backward_with_experts_wgrad",
    "use_transformer_engine_op_fuser",
    "fp8_output_proj",
    "use_grouped_gemm_for_shared_expert",
    "use_grouped_gemm_for_dense_mlp",
    "moe_shared_expert_glu_interleave_size",
    "moe_mlp_glu_interleave_size",
    "moe_router_quantile_balancing_ema",
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
    "moe_permute_fusion_into_hybridep",
    "moe_hybridep_pad_uneven_dispatch_inputs",
    "moe_ncclep_static_shape",
    "moe_ncclep_zero_copy",
    "moe_expert_rank_capacity_factor",
    "moe_paged_stash",
    "delay_offload_until_cuda_graph",
)

RELEASES = {
    row.version: row
    for row in (
        Release("0.12.1", groups=None, collection=None, stages=(), **_OLD),
        Release("0.12.3", groups=None, collection=None, stages=(), **_OLD),
        Release("0.14.0", groups="model_comm_pgs", collection="ModelCommProcessGroups", stages=("vp_stage",), **_OLD),
        Release("0.15.3", **_OLD),
        Release("0.16.1"),
        Release("0.17.0", legacy_experts=False, new_options=_OPTIONS_17),
        Release("0.19.2", legacy_experts=False, mlp_is_called=True, new_options=_OPTIONS_19),
    )
}
"""Each row was run: ``tests/integrations/megatron/test_versions.py``, and ``docs/compat.md`` says in which layouts."""


@functools.cache
def release() -> Release:
    """The installed one.

    Raises:
        ImportError: megatron-core is missing, or of a version that has no row; names those that have one.
    """
    return RELEASES[releases.require("megatron-core")]


def check(needed: bool = True) -> None:
    """Refuse a version of torch or megatron-core that was not tested.

    Args:
        needed: refuse too when megatron-core is missing.

    Raises:
        ImportError: names what is installed and what is supported.
    """
    releases.require("torch")
    if needed or present():
        releases.require("megatron-core")
    release.cache_clear()


def present() -> bool:
    """Whether megatron-core is installed, of whatever version."""
    return releases.installed("megatron-core") is not None


def require_training(what: str) -> None:
    """Refuse ``what`` where the release only scores.

    Raises:
        ValueError: names the release and the one that works.
    """
    if not release().trains:
        raise ValueError(f"{what} under a contract is not supported with megatron-core {release().version}, which only scores; megatron-core {FULL} would work")

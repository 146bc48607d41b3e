"""The seam to vllm-ascend 0.23: for each layer class that it registers, whether ours takes its place in a model of ours. Data only.

vllm-ascend registers its classes by name in vLLM's out-of-tree registry when a worker is built (``register_ascend_customop``), and vLLM makes them
instead of its own. Ours take the same seam, for the time a model of ours is built and no longer (:mod:`..scoped`): the registry's entries are
replaced, and put back. So a model that is not ours gets vllm-ascend's layers, in the same process too.
"""

from __future__ import annotations

OURS = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
    "VocabParallelEmbedding",
    "ParallelLMHead",
    "LogitsProcessor",
    "FusedMoE",
    "GateLinear",
)
"""Names under which vllm-ascend registers a class and a model of ours has one of ours."""

BESIDE = {"ApplyRotaryEmb": "AscendApplyRotaryEmb"}
"""Built inside a layer of ours and never called: ours rotates by itself."""

ELSEWHERE = (
    "QuickGELU",
    "SiluAndMulClamp",
    "MRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "DeepseekScalingRotaryEmbedding",
    "GemmaRMSNorm",
    "MultiHeadLatentAttentionWrapper",
    "MMEncoderAttention",
    "RMSNormGated",
    "Conv3dLayer",
    "RelPosAttention",
    "CustomQwen2Decoder",
    "GatedDeltaNetAttention",
    "BailingMoELinearAttention",
)
"""Not part of a Qwen3 or Qwen3-MoE model; one that turned up in a model of ours would be refused by name."""

HARMLESS = ("ApplyRotaryEmb", "MoERunner", *BESIDE.values())
"""Classes that may stand in a model of ours without being one."""

ENGINE_OPTIONS = {"weight_transfer_config": None, "async_scheduling": False, "block_size": 128}
"""What an engine on an NPU is given beside what every engine is; ``None`` leaves an option out."""

ADDITIONAL = {"weight_nz_mode": 0}
"""And in ``additional_config``: vllm-ascend's own default is 1."""

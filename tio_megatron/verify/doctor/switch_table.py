"""What environment variables do to an order of sums, as data: which values help, which break it, and why."""

from __future__ import annotations

from dataclasses import dataclass

from tio_megatron.findings.finding import Level
from tio_megatron.integrations.npu_switches import SWITCHES as NPU

ANY = ("*",)
UNSET = "unset"


@dataclass(frozen=True)
class Switch:
    """One variable.

    ``device``: where it counts (empty: on all). ``helps`` and ``breaks``: values (``unset``; ``*`` for any), compared without case; a value in neither is
    neutral. ``why``: what it does to the stock packages. ``plugged``: what that means under the contract, and ``level`` how bad a breaking value is there.
    ``works``: what to set.
    """

    name: str
    device: str
    why: str
    breaks: tuple[str, ...] = ()
    helps: tuple[str, ...] = ()
    works: str = ""
    plugged: str = "covered sums do not pass there"
    level: Level = "note"


_VENDOR = "vendor sums between ranks are not used under the contract"
_OURS = "covered products are ours"

SWITCHES = (
    # Sums between cards.
    Switch("NCCL_ALGO", "cuda", "NCCL chooses ring or tree by message size: the order of an all-reduce moves with it, and with the start of the ring",
           (UNSET,), ("ring", "tree"), "NCCL_ALGO=Ring", _VENDOR),
    Switch("NCCL_PROTO", "cuda", "the protocol changes how messages are cut, and with it the order", (UNSET,), ("simple", "ll", "ll128"),
           "NCCL_PROTO=Simple", _VENDOR),
    Switch("NCCL_NVLS_ENABLE", "cuda", "NVLink SHARP adds in the switch, in an order of its own", ("1", "2"), ("0",), "NCCL_NVLS_ENABLE=0", _VENDOR),
    Switch("NCCL_COLLNET_ENABLE", "cuda", "the network adds, in an order of its own", ("1",), ("0",), "NCCL_COLLNET_ENABLE=0", _VENDOR),
    Switch("NCCL_MIN_NCHANNELS", "cuda", "channels cut a message, each with a ring of its own", (), (), "", _VENDOR),
    Switch("NCCL_MAX_NCHANNELS", "cuda", "channels cut a message, each with a ring of its own", (), (), "", _VENDOR),
    Switch("VLLM_USE_NCCL_SYMM_MEM", "cuda", "NCCL's kernels for symmetric memory add in another order than its ring", ("1",), ("0",),
           "VLLM_USE_NCCL_SYMM_MEM=0", _VENDOR),
    Switch("VLLM_ALLREDUCE_USE_SYMM_MEM", "cuda", "vLLM's all-reduce through symmetric memory adds in another order than NCCL's", ("1",), ("0",),
           "VLLM_ALLREDUCE_USE_SYMM_MEM=0", _VENDOR),
    *(Switch(one.name, "npu", one.about, (UNSET, *(("0", "false") if one.value in ("1", "strict") else ("1", "true"))), (one.value, *one.also),
             f"{one.name}={one.value}") for one in NPU),  # under the contract: switches.of_npu
    Switch("ACL_OPT_DETERMINISTIC", "npu", "the older way to ask for a deterministic level; under the contract torch_npu is asked for one"),
    # Products.
    Switch("CUBLAS_WORKSPACE_CONFIG", "cuda", "cuBLAS may choose another algorithm from run to run", (UNSET,), (":4096:8", ":16:8"),
           "CUBLAS_WORKSPACE_CONFIG=:4096:8", _OURS),
    Switch("NVIDIA_TF32_OVERRIDE", "cuda", "fp32 products lose 13 bits", ("1",), ("0",), "NVIDIA_TF32_OVERRIDE=0", _OURS),
    Switch("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "cuda", "fp32 products lose 13 bits", ("1",), ("0",), "leave it unset", _OURS),
    Switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "cuda", "Transformer Engine's attention backward adds with atomics", (UNSET, "1"), ("0",),
           "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0", "its attention is replaced"),
    Switch("MKL_CBWR", "cpu", "MKL chooses its code path by processor and alignment", (UNSET, "auto", "off"),
           ("compatible", "avx2", "avx512", "avx2,strict", "avx512,strict"), "MKL_CBWR=COMPATIBLE, slow, for stock runs only", _OURS),
    Switch("MKL_DYNAMIC", "cpu", "MKL changes its number of threads, and with it how products are cut", ("true", "1"), ("false", "0"),
           "MKL_DYNAMIC=FALSE", _OURS),
    Switch("MKL_NUM_THREADS", "cpu", "the number of threads cuts products", (), ("1",), "MKL_NUM_THREADS=1", _OURS),
    Switch("OPENBLAS_NUM_THREADS", "cpu", "the number of threads cuts products", (), ("1",), "OPENBLAS_NUM_THREADS=1", _OURS),
    Switch("OPENBLAS_CORETYPE", "cpu", "OpenBLAS takes the named processor's kernels: fixed over machines, if all have it", (), ANY, "", _OURS),
    Switch("ONEDNN_DEFAULT_FPMATH_MODE", "cpu", "oneDNN rounds fp32 operands", ("bf16", "tf32", "any", "f16"), ("strict",), "leave it unset",
           "covered products are ours; what stays stock is rounded"),
    Switch("OMP_NUM_THREADS", "", "the number of threads cuts sums of stock operators; with several ranks on a machine, unset starts a thread per core in each",
           (UNSET,), ("1",), "OMP_NUM_THREADS=1 per rank", "no byte changes; with several ranks on one machine each starts a thread per core"),
    Switch("OMP_DYNAMIC", "", "the runtime changes the number of threads, and with it how sums are cut", ("true", "1"), ("false", "0"), "OMP_DYNAMIC=FALSE",
           "no byte changes"),
    Switch("CUDA_LAUNCH_BLOCKING", "cuda", "launches wait; no order changes"),
    Switch("CUDA_DEVICE_MAX_CONNECTIONS", "cuda", "the order of launches, not of sums; Megatron wants 1 for its overlaps", (), ("1",)),
    # vLLM's own.
    Switch("VLLM_BATCH_INVARIANT", "", "vLLM swaps its own batch-invariant kernels in: the same from batch to batch, other bytes than a trainer's", ("1",), (),
           "leave it unset under the contract", "it would fight with our layers", "bad"),
    Switch("VLLM_USE_V2_MODEL_RUNNER", "", "another model runner, with a sampler of its own", ("1",), ("0",), "VLLM_USE_V2_MODEL_RUNNER=0",
           "the second model runner is not covered", "bad"),
    Switch("VLLM_CPU_OMP_THREADS_BIND", "cpu", "which cores a worker's threads take; their number cuts sums of stock operators"),
    Switch("VLLM_CPU_KVCACHE_SPACE", "cpu", "how many pages there are: which requests share a batch, nothing else"),
    Switch("VLLM_ENABLE_V1_MULTIPROCESSING", "", "whether the engine has a process of its own; no sum changes"),
    Switch("VLLM_PLUGINS", "", "which plug-ins load; tio_megatron must be among them"),
)  # fmt: skip

HARMLESS = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_", "HCCL_IF_", "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_SOCKET_", "VLLM_LOGGING_",
            "VLLM_CACHE_ROOT",
            "VLLM_PORT", "VLLM_HOST", "VLLM_TARGET_DEVICE", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_USE_MODELSCOPE", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK",
            "MKL_SERVICE_", "OMP_PROC_BIND", "OMP_PLACES")  # fmt: skip
"""Beginnings of names that say where and how loudly, never how sums are cut."""

"""Environment variables that break or help a fixed order of sums, and what the ones set here do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tio_megatron.verify.doctor.findings import Finding, Level

TOPIC = "environment"


@dataclass(frozen=True)
class Switch:
    """One variable. ``stock`` is what it does for people without the plug-in, ``plugged`` for those with it.

    ``harmful`` values move an order (``*`` any value, ``unset`` none); ``plugged_level`` is how bad that is under the contract.
    """

    name: str
    harmful: tuple[str, ...]
    stock: str
    plugged: str
    works: str
    plugged_level: Level = "note"


_VENDOR_SUMS = "vendor sums between ranks are not used under the contract"
SWITCHES = (
    Switch(
        "NCCL_ALGO",
        ("unset",),
        "NCCL chooses ring or tree by message size: the order of an all-reduce moves with it",
        _VENDOR_SUMS,
        "NCCL_ALGO=Ring fixes the choice, not the start of the ring",
    ),
    Switch("NCCL_PROTO", ("unset",), "the protocol changes how messages are cut", _VENDOR_SUMS, "NCCL_PROTO=Simple"),
    Switch("NCCL_NVLS_ENABLE", ("1", "2"), "NVLink SHARP adds in the switch, in an order of its own", _VENDOR_SUMS, "NCCL_NVLS_ENABLE=0"),
    Switch("NCCL_COLLNET_ENABLE", ("1",), "the network adds, in an order of its own", _VENDOR_SUMS, "NCCL_COLLNET_ENABLE=0"),
    Switch("HCCL_DETERMINISTIC", ("false", "unset"), "HCCL's sums change from run to run", _VENDOR_SUMS, "HCCL_DETERMINISTIC=strict"),
    Switch("LCCL_DETERMINISTIC", ("0", "unset"), "LCCL's sums change from run to run", _VENDOR_SUMS, "LCCL_DETERMINISTIC=1"),
    Switch(
        "CLOSE_MATMUL_K_SHIFT",
        ("0", "unset"),
        "an NPU's matmul may start at another place of the K axis",
        "products on an NPU need it",
        "CLOSE_MATMUL_K_SHIFT=1",
        "bad",
    ),
    Switch(
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        ("1", "unset"),
        "ATB's matmul walks K in another order",
        "products on an NPU need it off",
        "ATB_MATMUL_SHUFFLE_K_ENABLE=0",
        "bad",
    ),
    Switch(
        "ATB_LLM_LCOC_ENABLE",
        ("1", "unset"),
        "products and sums between ranks are fused, in an order of their own",
        "products on an NPU need it off",
        "ATB_LLM_LCOC_ENABLE=0",
        "bad",
    ),
    Switch(
        "CUBLAS_WORKSPACE_CONFIG",
        ("unset",),
        "cuBLAS may choose another algorithm from run to run",
        "cuBLAS is not used for covered products",
        "CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ),
    Switch("NVIDIA_TF32_OVERRIDE", ("1",), "fp32 products lose 13 bits", "covered products are ours", "leave it unset"),
    Switch(
        "MKL_CBWR",
        ("unset",),
        "MKL chooses its code path by processor and alignment",
        "MKL is not used for covered products",
        "MKL_CBWR=COMPATIBLE, slow, for stock runs only",
    ),
    Switch(
        "ONEDNN_DEFAULT_FPMATH_MODE",
        ("BF16", "TF32", "ANY", "F16"),
        "oneDNN rounds fp32 operands",
        "covered products are ours; what stays stock is rounded",
        "leave it unset",
    ),
    Switch(
        "VLLM_BATCH_INVARIANT",
        ("1",),
        "vLLM swaps its own kernels in: other bytes than a trainer's",
        "it would fight with our layers",
        "leave it unset under the contract",
        "bad",
    ),
    Switch("VLLM_USE_V2_MODEL_RUNNER", ("1",), "", "the second model runner is not covered", "VLLM_USE_V2_MODEL_RUNNER=0", "bad"),
    Switch(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        ("1", "unset"),
        "Transformer Engine's attention backward adds with atomics",
        "its attention is replaced",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
    ),
)

_DEVICES = {
    "NCCL_": "cuda",
    "CUBLAS_": "cuda",
    "NVIDIA_": "cuda",
    "NVTE_": "cuda",
    "CUDA_": "cuda",
    "HCCL_": "npu",
    "LCCL_": "npu",
    "CLOSE_": "npu",
    "ATB_": "npu",
    "MKL_": "cpu",
    "ONEDNN_": "cpu",
    "VLLM_": "",
}
"""The device a variable matters on; empty: on all."""


def check(device: str, *, plugged: bool, environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """The variables that matter on ``device`` (``cpu``, ``cuda`` or ``npu``) and do harm as they are.

    Args:
        device: where the run will be.
        plugged: whether it runs under the contract (else stock packages).
        environ: ``os.environ`` by default.
    """
    values = os.environ if environ is None else environ
    clean = True
    for switch in SWITCHES:
        where = next(there for prefix, there in _DEVICES.items() if switch.name.startswith(prefix))
        if where not in ("", device):
            continue
        value = values.get(switch.name)
        said = "unset" if value is None else value
        if said.lower() not in {harmful.lower() for harmful in switch.harmful}:
            continue
        why = switch.plugged if plugged else switch.stock
        if not why:
            continue
        if plugged and value is None and switch.plugged_level == "note":
            continue  # nobody asked for it, and it changes nothing here
        clean = False
        yield Finding(switch.plugged_level if plugged else "note", TOPIC, f"{switch.name} is {said}: {why}", switch.works)
    threads = values.get("OMP_NUM_THREADS")
    if threads is None and device == "cpu":
        clean = False
        yield Finding(
            "note",
            TOPIC,
            "OMP_NUM_THREADS is unset: with several ranks on one machine each starts a thread per core; no byte changes",
            "OMP_NUM_THREADS=1 per rank",
        )
    if clean:
        yield Finding("ok", TOPIC, f"no variable that moves an order on {device} is set against it")

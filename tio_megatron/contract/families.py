"""Kernel families: what each fixes inside a leaf, and where its kernels run. Bytes agree within a family, never across."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tio_megatron.findings.messages import shown


@dataclass(frozen=True)
class Family:
    """One set of kernels with one order inside a leaf.

    Args:
        device: torch device type of its tensors.
        file: its kernels are ``kernels/<op>/<file>.py``.
        fields: what it fixes among the fields of a contract: ``kv_block`` keys of one step of the attention walk; ``chain`` terms of one
            chain inside a leaf of a product (0: the leaf is one chain); ``row_chain`` and ``router_chain`` the same along a row.
        order: what else it fixes, by name. Only its own kernels read it.
        cuts: its defaults for :class:`Cuts`, where they are not 8. More leaves cost an accelerator time and registers.
        operands: element types of activations and weights that it takes, as in ``torch.<name>``.
        package: what must be installed, beside torch.
    """

    device: str
    file: str
    fields: Mapping[str, int]
    order: Mapping[str, int | str] = field(default_factory=dict)
    cuts: Mapping[str, int] = field(default_factory=dict)
    operands: tuple[str, ...] = ("bfloat16",)
    package: str | None = None


ACCELERATOR_CUTS = {"attn_row": 4, "expert_row": 1}
"""An expert is not cut where it is small (ETP 1), and attention's output projection at most four times."""

FAMILIES: dict[str, Family] = {
    "cpu": Family(
        device="cpu",
        file="cpu",
        fields={"kv_block": 64, "chain": 256, "row_chain": 32, "router_chain": 8},
        order={"product": "ascending fused multiply-adds from +0, chains joined by the tree"},
        operands=("bfloat16", "float32"),
    ),
    "triton-sm90": Family(
        device="cuda",
        file="triton",
        fields={"kv_block": 64, "chain": 0, "row_chain": 32, "router_chain": 8},
        order={
            "product": "one matrix instruction at every size, the leaf's blocks of k_block terms ascending into one fp32 accumulator from +0",
            "k_block": 64,
            "rows": 64,
            "columns": 128,
            "query_rows": 64,
        },
        cuts=ACCELERATOR_CUTS,
        package="triton",
    ),
    "npu-910b": Family(
        device="npu",
        file="npu",
        fields={"kv_block": 512, "chain": 0, "row_chain": 32, "router_chain": 8},
        order={
            "attention": "blocks of kv_block keys, p rounded to the operands' type before the second product; kernels/npu/twin_attention.py",
            "norm": "squares folded in halves down to 64, then the tree; kernels/npu/twin.py",
            "product": "Triton kernels: one fp32 accumulator a leaf, blocks of 64 terms ascending; experts of one leaf by npu_grouped_matmul",
        },
        cuts=ACCELERATOR_CUTS,
        package="torch_npu",
    ),
}


def family(name: str) -> Family:
    """The family called ``name``.

    Raises:
        ValueError: no such family.
    """
    if name not in FAMILIES:
        raise ValueError(f"contract: unknown kernel family {shown(name)}; known are {sorted(FAMILIES)}")
    return FAMILIES[name]

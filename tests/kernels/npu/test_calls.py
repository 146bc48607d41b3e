"""Every call of ours against the schemas of the wheel, without the wheel: torch checks names, order, keyword-only arguments and types."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tio_megatron.kernels import npu_family
from tio_megatron.kernels.attention import npu as attention
from tio_megatron.kernels.grouped import npu as grouped
from tio_megatron.kernels.norm import npu as norm
from tio_megatron.kernels.npu import permute, stand_in
from tio_megatron.kernels.npu.calls import FLASH, find
from tio_megatron.kernels.npu.schemas import FLASH_SCHEMAS, SCHEMAS, TORCH_NPU
from tio_megatron.testing import assert_same_bytes

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "tio_megatron"
SNAPSHOT = ROOT / "tests" / "npu" / f"schemas_torch_npu_{TORCH_NPU}.txt"

HEADS, GROUPS, SIZE = 4, 2, 128
SCALE = SIZE**-0.5


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def called_in_the_package() -> set[str]:
    """The operators that ``find("...")`` asks for anywhere in the package."""
    names = set()
    for path in (
        *PACKAGE.rglob("npu.py"),
        *(PACKAGE / "kernels" / "npu").rglob("*.py"),
        *PACKAGE.glob("ascend*.py"),
        *(PACKAGE / "integrations").rglob("*.py"),
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "find"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                names.add(node.args[0].value)
    return names


def test_the_table_is_the_snapshot_of_the_wheel() -> None:
    assert SNAPSHOT.read_text().splitlines() == list(SCHEMAS)


def test_every_operator_that_is_called_is_in_the_table() -> None:
    named = {re.match(r"\w+::(\w+)\(", schema).group(1) for schema in (*SCHEMAS, *FLASH_SCHEMAS)}
    assert called_in_the_package() <= named
    assert named - called_in_the_package() <= {"npu_fused_infer_attention_score"}  # stock engines call it; the self-check compares


def test_torch_registers_the_schemas_as_they_stand() -> None:
    for schema in SCHEMAS:
        name = schema.split("::")[1].split("(")[0]
        assert str(find(name)._schema) == schema


class Recorder(TorchDispatchMode):
    """The NPU operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace in ("npu", FLASH):
            self.seen.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def packed(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = sum(lengths)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return bf16(total, HEADS, SIZE), bf16(total, GROUPS, SIZE), bf16(total, GROUPS, SIZE), starts


def test_attention_and_its_gradient_run_through_the_schemas(route: str) -> None:
    q, k, v, starts = packed(5, 20)
    with Recorder() as recorder:
        o, lse = attention.attention(q, k, v, starts, starts, SCALE)
        gradients = attention.attention_backward(torch.ones_like(o), q, k, v, o, lse, starts, starts, SCALE)
    vendor = ["npu_fusion_attention", "npu_fusion_attention_grad"]
    assert recorder.seen == (vendor if route == "vendor" else ["_flash_attn_forward", "_flash_attn_backward"])
    assert o.shape == q.shape and lse.shape == q.shape[:2] and [g.shape for g in gradients] == [t.shape for t in (q, k, v)]


def test_the_statistics_are_tokens_first(route: str) -> None:
    """The vendor's default lays them heads first under the same shape; each token's own must come out."""
    q, k, v, starts = packed(3)
    _, lse = attention.attention(q, k, v, starts, starts, SCALE)
    scores = torch.einsum("hd,hd->h", q[0].float(), k[0].repeat_interleave(2, 0).float()) * SCALE
    assert torch.equal(lse[0].bfloat16(), scores.bfloat16())  # the first token sees itself alone


def test_pages_run_through_the_schemas_and_give_what_training_gives(route: str) -> None:
    q, k, v, starts = packed(130, 7)
    cache = torch.full((4, GROUPS, 128, 2 * SIZE), float("nan")).bfloat16()
    slots = torch.cat([128 * 3 + torch.arange(128), torch.arange(2), 256 + torch.arange(7)])
    table = torch.tensor([[3, 0, 0], [2, 0, 0], [9, 9, 9]], dtype=torch.int32)
    out = torch.full((140, HEADS, SIZE), 7.0).bfloat16()
    padded = torch.cat([q, bf16(3, HEADS, SIZE)])
    with Recorder() as recorder:
        attention.write_pages(k, v, cache, slots)
        attention.attention_paged(padded, cache, table, torch.tensor([130, 7, 0], dtype=torch.int32), starts, SCALE, out)
    operator = "npu_fused_infer_attention_score_v2" if route == "vendor" else "_flash_attn_forward"
    assert recorder.seen == ["npu_scatter_pa_kv_cache", operator]
    want, _ = attention.attention(q, k, v, starts, starts, SCALE)
    assert_same_bytes(out[:137], want, "pages against training")
    assert (out[137:] == 7).all()


def test_keys_outside_pages_give_what_training_gives() -> None:
    q, k, v, starts = packed(12, 1, 30)
    assert_same_bytes(attention.attention_dense(q, k, v, starts, starts, SCALE)[0], attention.attention(q, k, v, starts, starts, SCALE)[0], "dense")


def test_norm_product_and_permutation_run_through_the_schemas() -> None:
    x, w, ids = bf16(6, 256), [bf16(32, 256) for _ in range(4)], torch.tensor([[0, 3], [3, 1], [1, 0], [2, 3], [0, 2], [1, 2]])
    with Recorder() as recorder:
        y, total = norm.add_rms_norm(x, x, bf16(256), 1e-6)
        rows, where = permute.to_experts(x, ids)
        product = grouped.grouped(rows, w, torch.tensor([0, 3, 6, 9, 12]), 1, False, torch.bfloat16)
        back = permute.from_experts(product, where, 2)
    assert recorder.seen == ["npu_rms_norm", "npu_moe_token_permute", "npu_grouped_matmul", "npu_moe_token_unpermute"]
    assert_same_bytes(total, x + x, "the rounded sum")
    assert y.shape == x.shape and back.shape == (6, 2, 32)
    for t in range(6):
        for j in range(2):
            alone = grouped.grouped(x[t : t + 1], [w[ids[t, j]]], torch.tensor([0, 1]), 1, False, torch.bfloat16)
            assert_same_bytes(back[t, j], alone[0], f"token {t}, choice {j}: alone and among others")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: find("npu_rms_norm")(x, x[0], eps=1e-6),
        lambda x: find("npu_fused_infer_attention_score_v2")(x, x, x, None),
        lambda x: find("npu_fused_infer_attention_score_v2")(x, x, x, num_heads=1),
        lambda x: find("npu_fusion_attention")(x, x, x, "TND", 4),
        lambda x: find("npu_grouped_matmul")(x, [x]),
    ],
    ids=["another name", "keyword-only", "the other version's name", "another order", "not a list"],
)
def test_a_wrong_call_is_caught(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((RuntimeError, TypeError)):
        call(bf16(4, 8))


def test_an_operator_that_nobody_registered_says_what_registers_it() -> None:
    with pytest.raises(RuntimeError, match="import torch_npu first"):
        find("npu_no_such_operator")


def test_the_twins_do_not_stand_beside_the_real_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "_libraries", [])
    with pytest.raises(RuntimeError, match="registered in this process already"):
        stand_in.install()


def test_the_package_of_the_attention_is_part_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = set()
    for name in npu_family.ROUTES:
        monkeypatch.setenv(npu_family.VARIABLE, name)
        npu_family.route.cache_clear()
        versions.add(npu_family.version())
    assert len(versions) == 2
    monkeypatch.setenv(npu_family.VARIABLE, "mine")
    npu_family.route.cache_clear()
    with pytest.raises(ValueError, match="TIO_NPU_ATTENTION='mine'.*vendor, flash-attention-npu"):
        npu_family.route()
    monkeypatch.undo()
    npu_family.route.cache_clear()

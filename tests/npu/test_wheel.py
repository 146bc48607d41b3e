"""Every call of ours against torch_npu's wheel: its schemas are the snapshot's, and each call runs on a device ``npu`` that has shapes alone.

``make test-ascend`` runs this, in an environment of its own with load-time stand-ins for CANN (``stub.py``). No NPU is needed, and none is
simulated: nothing here is a number. Elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

HERE = os.environ.get("ASCEND_WHEEL") == "1" and importlib.util.find_spec("torch_npu") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="torch_npu's wheel is needed: make test-ascend makes an environment with it")

if HERE:
    import torch_npu
    import torch_npu.op_plugin.meta._meta_registrations as shapes
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.npu import snapshot
    from tio_megatron.contract import Contract
    from tio_megatron.kernels import families, npu_family
    from tio_megatron.kernels.attention import npu as attention
    from tio_megatron.kernels.grouped import npu as grouped
    from tio_megatron.kernels.norm import npu as norm
    from tio_megatron.kernels.npu import masks, permute
    from tio_megatron.kernels.npu.calls import find
    from tio_megatron.kernels.npu.lengths import numbers
    from tio_megatron.kernels.npu.schemas import SCHEMAS, TORCH_NPU

HEADS, GROUPS, SIZE = 32, 4, 128
SOC_910B = 220


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device ``npu`` of shapes alone. Its shape functions ask which chip it is."""
    monkeypatch.setattr(shapes, "get_soc_version", lambda: SOC_910B)
    masks.causal.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    masks.causal.cache_clear()


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="npu")


def like(tensor: torch.Tensor, *shape: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    return tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.device.type == "npu"


@pytest.fixture
def lengths() -> torch.Tensor:
    """Cumulative starts on the host, read before there are shapes alone."""
    made = torch.tensor([0, 8, 24], dtype=torch.int32)
    numbers("here", "made", made)
    return made


@pytest.fixture
def counts() -> torch.Tensor:
    made = torch.tensor([200, 16], dtype=torch.int32)
    numbers("here", "made", made)
    return made


def test_it_is_the_release_of_the_snapshot() -> None:
    assert torch_npu.__version__.split("+")[0] == TORCH_NPU == snapshot.VERSION


def test_the_wheels_schemas_are_the_snapshots() -> None:
    assert snapshot.snapshot() == snapshot.FILE.read_text()
    assert snapshot.FILE.read_text().splitlines() == list(SCHEMAS)


def test_a_real_tensor_cannot_be_made() -> None:
    """Negative control: what stands in for CANN has no device."""
    with pytest.raises(RuntimeError, match="507899"):
        torch.ones(2, device="npu")


def test_attention_and_its_gradient(lengths: torch.Tensor, fake: None) -> None:
    q, k, v = bf16(24, HEADS, SIZE), bf16(24, GROUPS, SIZE), bf16(24, GROUPS, SIZE)
    o, lse = attention.attention(q, k, v, lengths, lengths, 0.1)
    assert like(o, 24, HEADS, SIZE) and like(lse, 24, HEADS, dtype=torch.float32)
    dq, dk, dv = attention.attention_backward(o, q, k, v, o, lse, lengths, lengths, 0.1)
    assert like(dq, 24, HEADS, SIZE) and like(dk, 24, GROUPS, SIZE) and like(dv, 24, GROUPS, SIZE)


def test_attention_without_pages(lengths: torch.Tensor, fake: None) -> None:
    o, lse = attention.attention_dense(bf16(24, HEADS, SIZE), bf16(24, GROUPS, SIZE), bf16(24, GROUPS, SIZE), lengths, lengths, 0.1)
    assert like(o, 24, HEADS, SIZE) and like(lse, 24, HEADS, dtype=torch.float32)


@pytest.mark.parametrize("page", [128, 256, 512])
def test_pages(page: int, lengths: torch.Tensor, counts: torch.Tensor, fake: None) -> None:
    cache = bf16(10, GROUPS, page, 2 * SIZE)
    attention.write_pages(bf16(24, GROUPS, SIZE), bf16(24, GROUPS, SIZE), cache, torch.empty(24, dtype=torch.int64, device="npu"))
    out = bf16(26, HEADS, SIZE)
    table = torch.empty(2, 5, dtype=torch.int32, device="npu")
    attention.attention_paged(bf16(26, HEADS, SIZE), cache, table, counts, lengths, 0.1, out)
    assert like(out, 26, HEADS, SIZE)


def test_the_first_version_as_stock_engines_call_it(fake: None) -> None:
    mask = masks.causal(torch.device("npu"))
    given = {"actual_seq_lengths": [8, 24], "actual_seq_lengths_kv": [200, 16], "num_heads": HEADS, "num_key_value_heads": GROUPS, "scale": 0.1}
    pages, table = bf16(10, 128, GROUPS * SIZE), torch.empty(2, 5, dtype=torch.int32, device="npu")
    o, _ = find("npu_fused_infer_attention_score")(
        bf16(24, HEADS, SIZE), pages, pages, atten_mask=mask, block_table=table, block_size=128, input_layout="TND", sparse_mode=3, **given
    )
    assert like(o, 24, HEADS, SIZE)


def test_norms(fake: None) -> None:
    y, total = norm.add_rms_norm(bf16(24, 2048), bf16(24, 2048), bf16(2048), 1e-6)
    assert like(y, 24, 2048) and like(total, 24, 2048)
    assert like(norm.rms_norm(bf16(24, HEADS, SIZE), bf16(SIZE), 1e-6), 24, HEADS, SIZE)


def test_the_grouped_product(fake: None) -> None:
    offsets = torch.empty(9, dtype=torch.int64, device="npu")
    weights = list(bf16(8, 1536, 2048).unbind(0))
    assert like(grouped.grouped(bf16(24, 2048), weights, offsets, 1, False, torch.bfloat16), 24, 1536)


def test_the_permutation(fake: None) -> None:
    rows, where = permute.to_experts(bf16(24, 2048), torch.empty(24, 8, dtype=torch.int64, device="npu"))
    assert like(rows, 192, 2048) and like(where, 192, dtype=torch.int32)
    assert like(permute.from_experts(rows, where, 8), 24, 8, 2048)


def test_the_shape_functions_do_not_refuse_so_ours_must(fake: None) -> None:
    """Negative control: a layout that does not exist passes the wheel's own shapes."""
    q = bf16(24, HEADS, SIZE)
    find("npu_fusion_attention")(q, q, q, HEADS, "XYZ")


def test_the_family_loads_beside_torch_npu() -> None:
    family = families.load("npu-910b")
    assert family.device == "npu" and Contract(family="npu-910b").kv_block == 512
    for operator in ("attention", "attention_backward", "attention_paged", "write_pages", "rms_norm", "add_rms_norm", "grouped"):
        assert families.serves(operator, "npu"), operator
    assert families.version("npu-910b") == npu_family.version()


def test_the_self_check_refuses_a_machine_whose_npu_cannot_be_used() -> None:
    """torch_npu is there, and says that there is a device; the first number that is asked of it fails."""
    done = subprocess.run([sys.executable, "-m", "tio_megatron.ascend_selfcheck"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no NPU to ask" in done.stderr and "507899" in done.stderr, done.stderr

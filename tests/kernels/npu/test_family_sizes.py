"""The sizes that a contract refuses for an NPU are those that its kernels refuse, on both sides of each limit."""

import dataclasses

import pytest
import torch

from tio_megatron.contract import Contract, Layout, ModelShape, family_sizes
from tio_megatron.kernels.norm import npu as norm
from tio_megatron.kernels.npu import limits, limits_inference, limits_training
from tio_megatron.kernels.npu.limits import check_grouped
from tio_megatron.kernels.npu.limits_inference import check_inference
from tio_megatron.verify.doctor.models import KNOWN

CONTRACT = Contract(family="npu-910b")
MODEL = ModelShape(layers=2, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=768)


def said(serving=False, layout=None, **sizes):
    return [str(one) for one in CONTRACT.problems(layout or Layout(), dataclasses.replace(MODEL, **sizes), serving=serving)]


def refused(call):
    """Whether the kernel's own check refuses, in its words."""
    try:
        call()
    except ValueError as error:
        return str(error)
    except RuntimeError:  # past the checks: there is no NPU here
        return ""
    return ""


def test_the_numbers_are_the_documents():
    theirs = (limits_inference.MAX_HEADS, limits_inference.MAX_RATIO, limits_training.MAX_SIZE, limits.MAX_LIST, limits.INNER)
    assert theirs == (family_sizes.NPU_HEADS, family_sizes.NPU_RATIO, family_sizes.NPU_TRAINED_HEAD, family_sizes.NPU_EXPERTS, family_sizes.NPU_INNER)
    assert limits_training.MAX_HEADS == limits_inference.MAX_HEADS


@pytest.mark.parametrize("width", [1024, 2048, 2560, 4096, 5120])
def test_a_norm_is_refused_for_the_same_widths(width):
    rows = torch.zeros(2, width, dtype=torch.bfloat16)
    words = refused(lambda: norm.rms_norm(rows, rows[0], 1e-6))
    assert ("1 / H" in words) == any(line.startswith("norms: ") for line in said(hidden=width)), (words, said(hidden=width))


@pytest.mark.parametrize("heads, groups, size", [(32, 4, 128), (32, 4, 64), (32, 4, 256), (256, 4, 128), (257, 257, 128), (128, 1, 128), (64, 1, 128)])
def test_attention_over_pages_is_refused_for_the_same_heads(heads, groups, size):
    q, pages = torch.zeros(1, heads, size, dtype=torch.bfloat16), torch.zeros(1, 128, groups * size, dtype=torch.bfloat16)
    mask = torch.ones(2048, 2048, dtype=torch.int8)
    kinds = {"input_layout": "TND", "num_heads": heads, "num_key_value_heads": groups, "atten_mask": mask, "sparse_mode": 3}
    lengths = {"actual_seq_qlen": [1], "actual_seq_kvlen": [1], "block_table": torch.zeros(1, 1, dtype=torch.int32), "block_size": 128}
    words = refused(lambda: check_inference(q, pages, pages, version=2, **kinds, **lengths))
    ours = said(serving=True, heads=heads, kv_heads=groups, head_dim=size, hidden=2048)
    assert bool(words) == any(line.startswith("attention") and "family" in line for line in ours), (words, ours)


@pytest.mark.parametrize("experts", [128, 129])
def test_a_grouped_product_is_refused_for_the_same_experts(experts):
    weights = [torch.zeros(16, 16, dtype=torch.bfloat16)] * experts
    words = refused(lambda: check_grouped(torch.zeros(1, 16, dtype=torch.bfloat16), weights, torch.zeros(experts, dtype=torch.int64)))
    assert bool(words) == bool(said(experts=experts)), (words, said(experts=experts))
    assert said(experts=256, layout=Layout(ep=2, dp=2)) == []


def test_other_families_have_no_such_limits_and_the_known_models_are_judged():
    assert list(Contract().problems(Layout(), dataclasses.replace(MODEL, hidden=5120), serving=True)) == []
    found = {name for name, shape in KNOWN.items() if list(CONTRACT.problems(Layout(), shape, serving=True))}
    assert found == {"Qwen3-32B"}
    with pytest.raises(ValueError, match="hidden size 5120 is no power of two"):
        CONTRACT.check(Layout(), KNOWN["Qwen3-32B"])

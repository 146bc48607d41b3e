"""Everything that megatron-core takes from apex, by its own source: each has its place in docs/megatron.md, and a new name fails this test.

What of it is called, beside a stock control, is counted by ``apex_stand_in.py``.
"""

import ast
from pathlib import Path

import megatron.core

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ("amp_C", "fused_weight_gradient_mlp_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda")
"""Extension modules that apex installs beside itself, or that are compiled from its sources."""

TAKEN = {
    "apex.optimizers.FusedAdam",
    "apex.optimizers.FusedSGD",
    "apex.multi_tensor_apply.multi_tensor_applier",
    "amp_C.multi_tensor_l2norm",
    "amp_C.multi_tensor_scale",
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction",
    "apex.contrib.layer_norm.layer_norm.FastLayerNormFN",
    "apex.contrib.nccl_allocator",
    "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16",
    "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32",
    "scaled_masked_softmax_cuda.backward",
    "scaled_masked_softmax_cuda.forward",
    "scaled_masked_softmax_cuda.get_batch_per_block",
    "scaled_softmax_cuda.backward",
    "scaled_softmax_cuda.forward",
    "scaled_upper_triang_masked_softmax_cuda.backward",
    "scaled_upper_triang_masked_softmax_cuda.forward",
}


def names(source):
    """What a file imports of apex by name, and the functions of the extension modules that it calls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("apex."))
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "apex":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in KERNELS:
            yield f"{node.value.id}.{node.attr}"


def test_no_name_is_left_out():
    files = [path.read_text() for path in Path(megatron.core.__file__).parent.rglob("*.py")]
    assert set().union(*map(names, (text for text in files if "apex" in text or "_cuda" in text or "amp_C" in text))) == TAKEN


def test_every_name_has_its_place_in_the_docs():
    text = (ROOT / "docs" / "megatron.md").read_text()
    table = text[text.index("### apex") :].partition("\n## ")[0]
    missing = [name for name in TAKEN if f"`{name.rpartition('.')[2]}`" not in table]
    assert not missing

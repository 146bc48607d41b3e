"""Run by a test in a process of its own: optimizer steps where something that looks like apex can be imported, and notes its calls.

Argument: a folder, for the package and the files ``ordered`` and ``stock`` with the names of what was called.
"""

import sys
from pathlib import Path

PACKAGE = {
    "stand_in_notes.py": """
from pathlib import Path

WHERE = "import"

def note(name):
    with open(Path(__file__).with_name(WHERE), "a") as file:
        file.write(name + "\\n")
""",
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": """
import torch
from stand_in_notes import note

class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, adam_w_mode=True, **options):
        note("FusedAdam")
        super().__init__(params, **options)

    def step(self, closure=None):
        note("FusedAdam.step")
        return super().step(closure)

class FusedSGD(torch.optim.SGD):
    def __init__(self, *args, **options):
        note("FusedSGD")
        super().__init__(*args, **options)
""",
    "apex/multi_tensor_apply/__init__.py": """
from stand_in_notes import note

def multi_tensor_applier(function, overflow, lists, *args):
    note("multi_tensor_applier")
    return function(overflow, lists, *args)
""",
    "fused_weight_gradient_mlp_cuda.py": """
from stand_in_notes import note

def wgrad_gemm_accum_fp32(inputs, outputs, main_grad):
    note("wgrad_gemm_accum_fp32")
    main_grad.add_((outputs.float().t() @ inputs.float()))
""",
    "apex/contrib/__init__.py": "",
    "apex/contrib/layer_norm/__init__.py": "",
    "apex/contrib/layer_norm/layer_norm.py": """
from stand_in_notes import note

class FastLayerNormFN:
    def forward(self, inputs, weight, bias, eps):
        pass

    @staticmethod
    def apply(*args):
        note("FastLayerNormFN")
        return args[0]
""",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
from stand_in_notes import note

class FusedLayerNormAffineFunction:
    def forward(self, inputs, weight, bias, normalized_shape, eps):
        pass

    @staticmethod
    def apply(*args):
        note("FusedLayerNormAffineFunction")
        raise RuntimeError("a stand-in has no norm")
""",
    "scaled_masked_softmax_cuda.py": """
from stand_in_notes import note

def get_batch_per_block(*args):
    note("scaled_masked_softmax")
    return 1 << 30
""",
    "amp_C.py": """
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

def multi_tensor_l2norm(overflow, lists, each):
    return local_multi_tensor_l2_norm(None, overflow, lists, each)

def multi_tensor_scale(overflow, lists, factor):
    return local_multi_tensor_scale(None, overflow, lists, factor)
""",
}


def steps(rank, ordered):
    import stand_in_notes
    from hand_made import Row, made, step
    from megatron.core import parallel_state
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from tiny_megatron import running

    stand_in_notes.WHERE = "ordered" if ordered else "stock"
    if not ordered:
        transformer_block.LayerNormImpl = WrappedTorchNorm  # apex's has no RMSNorm
    assert clip_grads.multi_tensor_applier.__module__ == "apex.multi_tensor_apply", "the stand-in was not found"
    assert distrib_optimizer.HAVE_APEX_OR_TE
    for row in (Row(ordered=ordered), Row(ordered=ordered, sharded=True), Row(ordered=ordered, dtype="float32")):
        with running(row.setup):
            model, optimizer = made(row, log_num_zeros_in_grad=True)
            for seed in range(2):
                assert step(model, optimizer, row, seed)[0]
        parallel_state.destroy_model_parallel()


def whole_model(rank, ordered):
    """A forward and a backward pass with the options that would take apex's norms, softmax and accumulation of weight gradients."""
    import contextlib

    import stand_in_notes
    import te_cases
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    import tio_megatron as tio
    from tio_megatron.integrations.megatron import cpu_device
    from tio_megatron.integrations.megatron.applied.state import patched

    stand_in_notes.WHERE = "ordered" if ordered else "stock"
    assert layers._grad_accum_fusion_available
    plain = te_cases.config

    def config(*args):
        made = plain(*args)
        made.gradient_accumulation_fusion = made.masked_softmax_fusion = True
        return made

    te_cases.config = config
    if not ordered:
        transformer_block.LayerNormImpl = WrappedTorchNorm  # apex's has no RMSNorm
    with cpu_device.enabled():
        parallel_state.initialize_model_parallel(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        with tio.apply(vocab_size=1000) if ordered else contextlib.nullcontext():
            assert not ordered or patched()["shared"] == {}, "megatron-core's own choice of an Adam is no other plug-in's patch"
            made = te_cases.model(0, False, te=False)
            ddp = DistributedDataParallel(made.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), made)
            tokens = torch.randint(1000, (2, 33), generator=torch.Generator().manual_seed(1))
            ddp.zero_grad_buffer()
            mask = torch.ones(1, 1, 32, 32).triu(1).bool()
            ddp(tokens[:, :-1], torch.arange(32).expand(2, -1), mask, labels=tokens[:, 1:]).sum().backward()


def norms(rank, ordered):
    """LayerNorm, which stock takes from apex at any width, and from its faster form at some; under a contract it is refused."""
    import stand_in_notes
    import te_cases
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    import tio_megatron as tio
    from tio_megatron.integrations.megatron import cpu_device

    stand_in_notes.WHERE = "ordered" if ordered else "stock"
    with cpu_device.enabled():
        parallel_state.initialize_model_parallel(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = te_cases.config(0, False)
        config.normalization = "LayerNorm"
        if ordered:
            te_cases.config = lambda *args: config
            with tio.apply(vocab_size=1000):
                try:
                    te_cases.model(0, False, te=False)
                except ValueError as error:
                    assert "normalization='LayerNorm'" in str(error)
                else:
                    raise AssertionError("LayerNorm was not refused")
            return
        for width, fast in ((128, False), (1024, True)):
            config.persist_layer_norm = fast
            layer = FusedLayerNorm(config, width)
            try:
                layer(torch.ones(1, 1, width))
            except RuntimeError as error:
                assert "a stand-in has no norm" in str(error)


def main():
    folder = Path(sys.argv[1])
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    root = Path(__file__).resolve().parents[3]
    sys.path[:0] = [str(folder), str(root), str(root / "tests" / "support")]

    import hand_made  # noqa: F401  (imported once, before ranks are forked)

    from tio_megatron.testing import run_ranks

    for ordered in (True, False):
        run_ranks(1, steps, ordered, timeout=300)
        run_ranks(1, whole_model, ordered, timeout=300)
        run_ranks(1, norms, ordered, timeout=300)


if __name__ == "__main__":
    main()

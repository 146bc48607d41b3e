"""One expert layer of stock Megatron with our modules, built in any layout, fed with random hidden states.

The same global problem for every layout: S positions, B samples, E experts; a rank takes its samples (data parallel) and its positions
(sequence parallel). Results come back whole, so a test compares bytes of the global tensors.
"""

import contextlib
import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron import cpu_device, state
from tio_megatron.integrations.megatron.moe_spec import moe_spec
from tio_megatron.testing import run_ranks

S, B, H, I, E = 168, 4, 128, 96, 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Row:
    """One layout of one expert layer. ``sp`` is sequence parallelism, taken whenever there is tensor parallelism; without it: inference."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    way: str = "alltoall"
    k: int = 4
    dtype: str = "fp32"
    grouped: bool = True
    inference: bool = False
    experts: int = E

    @property
    def world(self):
        return max(self.tp, self.ep * self.etp)

    @property
    def sp(self):
        return self.tp > 1 and not self.inference

    @property
    def alone(self):
        """The same problem on one rank."""
        return dataclasses.replace(self, tp=1, ep=1, etp=1, way="alltoall", grouped=True, inference=False)

    def __str__(self):
        parts = [f"{n}{getattr(self, n)}" for n in ("tp", "ep", "etp") if getattr(self, n) > 1] or ["one"]
        parts += [self.way, f"k{self.k}", self.dtype, "grouped" if self.grouped else "sequential"]
        parts += ["inference"] if self.inference else []
        parts += [f"e{self.experts}"] if self.experts != E else []
        return "-".join(parts)


def problem(row, seed=0):
    """Weights, hidden states and an output gradient of the whole layer, in the row's dtype."""
    g = torch.Generator().manual_seed(seed)
    new = lambda *shape, scale=1.0: (torch.randn(*shape, generator=g) * scale).to(DTYPES[row.dtype])  # noqa: E731
    n = row.experts
    return SimpleNamespace(
        router=new(n, H, scale=0.3), gate=new(n, I, H, scale=0.1), up=new(n, I, H, scale=0.1), down=new(n, H, I, scale=0.15), x=new(S, B, H), dout=new(S, B, H)
    )


def config(row, **fields):
    dtype = DTYPES[row.dtype]
    chosen = dict(
        num_layers=1, hidden_size=H, num_attention_heads=4, ffn_hidden_size=I, moe_ffn_hidden_size=I, num_moe_experts=row.experts, moe_router_topk=row.k,
        moe_router_load_balancing_type="none", moe_token_dispatcher_type=row.way, moe_grouped_gemm=row.grouped, add_bias_linear=False, gated_linear_unit=True,
        activation_func=F.silu, tensor_model_parallel_size=row.tp, expert_model_parallel_size=row.ep, expert_tensor_parallel_size=row.etp,
        sequence_parallel=row.sp, params_dtype=dtype, bf16=dtype == torch.bfloat16, use_cpu_initialization=True, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, moe_router_dtype="fp32",
    )  # fmt: skip
    return TransformerConfig(**chosen | fields)


def build(row, stock=False, **fields):
    """The layer in this rank's layout, with the weights of :func:`problem`. ``stock``: Megatron's own."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(row.tp, expert_model_parallel_size=row.ep, expert_tensor_parallel_size=row.etp)
        model_parallel_cuda_manual_seed(1)
    chosen = config(row, **fields)
    spec = get_moe_module_spec(use_te=False, num_experts=row.experts, moe_grouped_gemm=row.grouped and not stock)
    layer = build_module(spec if stock else moe_spec(spec, chosen), config=chosen, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    load(layer, row, problem(row))
    return layer.eval() if row.inference else layer


def load(layer, row, p):
    ep, etp = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    lo, cut = ep * row.experts // row.ep, slice(etp * I // row.etp, (etp + 1) * I // row.etp)
    with torch.no_grad():
        layer.router.weight.copy_(p.router)
        for i, (w13, w2) in enumerate(expert_weights(layer)):
            w13.copy_(torch.cat((p.gate[lo + i][cut], p.up[lo + i][cut])))
            w2.copy_(p.down[lo + i][:, cut])


def expert_weights(layer):
    """(fc1, fc2) of each local expert."""
    if hasattr(layer.experts, "local_experts"):
        return [(e.linear_fc1.weight, e.linear_fc2.weight) for e in layer.experts.local_experts]
    return list(zip(layer.experts.linear_fc1.weights(), layer.experts.linear_fc2.weights(), strict=True))


def own(row, whole):
    """This rank's positions and samples of [S, B, ...]."""
    dp, r = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    part = whole.chunk(dp, 1)[r]
    return part.chunk(row.tp, 0)[parallel_state.get_tensor_model_parallel_rank()].contiguous() if row.sp else part.contiguous()


def place(row):
    return parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank() if row.sp else 0


def whole(row, parts):
    """The global [S, B, ...] from [(place, tensor)] of all ranks."""
    at = dict(parts)
    dp = max(d for d, _ in at) + 1
    tp = max(t for _, t in at) + 1
    return torch.cat([torch.cat([at[d, t] for t in range(tp)], 0) for d in range(dp)], 1)


def step(layer, row, x, dout=None, padding_mask=None):
    """Forward (and backward, given ``dout``) on this rank's part: [(name, tensor)]."""
    mine = own(row, x).requires_grad_(dout is not None)
    mask = None if padding_mask is None else own(row, padding_mask).t()
    out, bias = layer(mine, padding_mask=mask)
    assert bias is None
    if dout is None:
        return {"out": out.detach()}
    out.backward(own(row, dout))
    return {"out": out.detach(), "dx": mine.grad}


@contextlib.contextmanager
def session(contract=None):
    """A contract in force without the patches of ``apply``: the layer needs none."""
    state.enter(state.Session(contract or Contract()))
    try:
        yield
    finally:
        state.leave()


def run(row, fn, *args, timeout=120):
    """``fn(rank, *args)`` on the row's ranks, with the CPU device and a contract in force."""

    def main(rank):
        cpu_device.enable()
        with session():
            return fn(rank, *args)

    return run_ranks(row.world, main, timeout=timeout)


def gather(row, results, name):
    """The global tensor ``name`` from what each rank returned: (place, {name: tensor})."""
    return whole(row, [(where, tensors[name]) for where, tensors in results])


@pytest.fixture(scope="session")
def world():
    """The functions above, for the tests of this folder."""
    return SimpleNamespace(**{f.__name__: f for f in (problem, config, build, load, expert_weights, own, place, whole, step, session, run, gather)}, Row=Row, S=S, B=B, H=H, I=I, E=E)

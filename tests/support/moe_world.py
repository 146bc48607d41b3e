"""One expert layer of stock Megatron with our modules, built in any layout, fed with random hidden states.

The same global problem for every layout: S positions, B samples, E experts; a rank takes its samples (data parallel) and its positions
(sequence parallel). Results come back whole, so a test compares bytes of the global tensors.
"""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.collectives import all_gather, all_to_all
from tio_megatron.contract import Contract
from tio_megatron.contract.environment import Setting
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.megatron.modules.expert_spec import moe_spec
from tio_megatron.layers import dispatch, experts
from tio_megatron.testing import assert_same_bytes, run_ranks

S, B, H, WIDTH, E = 168, 4, 128, 96, 16
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
        router=new(n, H, scale=0.3),
        gate=new(n, WIDTH, H, scale=0.1),
        up=new(n, WIDTH, H, scale=0.1),
        down=new(n, H, WIDTH, scale=0.15),
        x=new(S, B, H),
        dout=new(S, B, H),
    )


def config(row, **fields):
    dtype = DTYPES[row.dtype]
    chosen = dict(
        num_layers=1, hidden_size=H, num_attention_heads=4, ffn_hidden_size=WIDTH, moe_ffn_hidden_size=WIDTH, num_moe_experts=row.experts,
        moe_router_topk=row.k,
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
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec if stock else moe_spec(spec, chosen), config=chosen, layer_number=1, pg_collection=groups)
    load(layer, row, problem(row))
    return layer.eval() if row.inference else layer


def load(layer, row, p):
    ep, etp = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    lo, cut = ep * row.experts // row.ep, slice(etp * WIDTH // row.etp, (etp + 1) * WIDTH // row.etp)
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


def whole(parts):
    """The global [S, B, ...] from [(place, tensor)] of all ranks; ranks of one place must agree."""
    at = {}
    for where, tensor in parts:
        assert_same_bytes(tensor, at.setdefault(where, tensor), f"two ranks at {where}")
    dp = max(d for d, _ in at) + 1
    tp = max(t for _, t in at) + 1
    return torch.cat([torch.cat([at[d, t] for t in range(tp)], 0) for d in range(dp)], 1)


def step(layer, row, x, dout=None, padding_mask=None):
    """Forward (and backward, given ``dout``) on this rank's part: its place and {name: tensor}."""
    mine = own(row, x).requires_grad_(dout is not None)
    mask = None if padding_mask is None else own(row, padding_mask).t()
    out, bias = layer(mine, padding_mask=mask)
    assert bias is None
    if dout is None:
        return place(row), {"out": out.detach()}
    out.backward(own(row, dout))
    return place(row), {"out": out.detach(), "dx": mine.grad}


@contextlib.contextmanager
def session(contract=None):
    """A contract in force without the patches of ``apply``: the layer needs none."""
    state.enter(Setting(contract or Contract()))
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


def gather(results, name):
    """The global tensor ``name`` from what each rank returned: (place, {name: tensor})."""
    return whole([(where, tensors[name]) for where, tensors in results])


@functools.cache
def alone(row):
    """Output and input gradient of the same problem on one rank."""
    row = row.alone
    p = problem(row)
    return run(row, lambda rank: step(build(row), row, p.x, p.dout))[0][1]


# Wrong orders, planted on purpose: what a layout test must notice. Each replaces one operator or collective inside a block. They compute
# the same sums, each term and rounding in place, in the order that some common implementation has.


@contextlib.contextmanager
def replaced(*places):
    """``(module, name, replacement)`` for the length of the block."""
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, new in places:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def _one_after_another(rows, index, ids, probs, *, experts, nodes):
    out = torch.full((len(nodes), index.shape[0], rows.shape[1]), -0.0)
    for j in range(index.shape[1]):
        here = (index[:, j] >= 0).nonzero().squeeze(1)
        term = rows[index[here, j]].float()
        out[0, here] = out[0, here] + (term if probs is None else term * probs[here, j, None])
    return out


def experts_in_sequence():
    """A rank adds its experts' rows one after another, ascending, as a scatter-add does."""
    return replaced((experts, "combine", _one_after_another))


def own_experts_first():
    """The owner of a token adds what its own experts gave, then what comes from its right neighbour, and so on around: as rows arrive."""

    def arriving(rows, index, ids, probs, *, experts, nodes):
        size, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
        order = ((ids // (experts // size) - rank) % size).argsort(dim=1, stable=True)
        index, probs = index.gather(1, order), None if probs is None else probs.gather(1, order)
        return _one_after_another(rows, index, ids, probs, experts=experts, nodes=nodes)

    return replaced((experts, "combine", arriving))


def shard_as_one_leaf():
    """A rank's share of the down-projection's K axis is one chain, as a matrix library has it, so the order follows the cut."""
    stock = experts.grouped_linear
    return replaced((experts, "grouped_linear", lambda x, w, offsets, *, leaves, out_dtype=None: stock(x, w, offsets, leaves=1, out_dtype=out_dtype)))


def ranks_in_sequence():
    """An all-reduce adds rank 0, then 1, then 2, ..."""

    def sequential(x, group, *, out_dtype=None):
        parts = all_gather(x.unsqueeze(0), group)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(out_dtype or torch.float32)

    return replaced((experts, "all_reduce", sequential))


def ring_from_owner():
    """A reduce-scatter over a ring: the sum of a token starts at its owner's right neighbour and ends at the owner."""

    def ring(x, spans, tree, group, *, splits, out_dtype=None):
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        local = x[0]
        for node in x[1:]:
            local = local + node
        parts = all_to_all(local, [splits[rank]] * size, splits, group).view(size, splits[rank], *x.shape[2:])
        total = parts[(rank + 1) % size]
        for step in range(2, size + 1):
            total = total + parts[(rank + step) % size]
        return total.to(out_dtype or torch.float32)

    return replaced((dispatch, "reduce_scatter_nodes", ring))


def rows_added_in_bf16():
    """Weighted rows are rounded, and so is the sum after each of them, as a scatter-add into bf16 does."""

    def rounded(rows, index, ids, probs, *, experts, nodes):
        out = torch.full((len(nodes), index.shape[0], rows.shape[1]), -0.0)
        for j in range(index.shape[1]):
            here = (index[:, j] >= 0).nonzero().squeeze(1)
            term = rows[index[here, j]] if probs is None else (rows[index[here, j]] * probs[here, j, None]).to(rows.dtype)
            out[0, here] = (out[0, here] + term).to(rows.dtype).float()
        return out

    return replaced((experts, "combine", rounded))


def partials_in_bf16():
    """A rank's partial sum is rounded before the all-reduce."""
    stock = experts.all_reduce
    return replaced((experts, "all_reduce", lambda x, group, *, out_dtype=None: stock(x.to(out_dtype).float(), group, out_dtype=out_dtype)))


_ORDERS = (experts_in_sequence, own_experts_first, shard_as_one_leaf, ranks_in_sequence, ring_from_owner)
PLANTS = {f.__name__: f for f in (*_ORDERS, rows_added_in_bf16, partials_in_bf16)}


def plants_for(row):
    """The wrong orders that must show on this row.

    Two terms commute, so some need three experts of a token, or three ranks. Products of bf16 numbers are short, so their fp32 sums are
    nearly exact in any order: bf16 rows are held against misplaced roundings, fp32 rows against orders.
    """
    if row.dtype == "bf16":
        return ["rows_added_in_bf16"] + (["partials_in_bf16"] if row.etp > 1 else [])
    found = ["shard_as_one_leaf"]
    if row.k > 2:
        found.append("experts_in_sequence")
    if row.etp > 2:
        found.append("ranks_in_sequence")
    if row.way == "allgather" and row.ep > 2 and row.k > 2:
        found.append("ring_from_owner")
    return found

"""A small model trained by DeepSpeed in any layout, as the ranks of ``testing.run_ranks``. Imports DeepSpeed only when it runs."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import nn

HIDDEN, WIDTH, VOCAB, EXPERTS, MICRO_BATCHES, SAMPLES, LENGTH = 32, 64, 48, 4, 4, 2, 9

ROWS_AND_COLUMNS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [".*down_proj\\.weight$", ".*o_proj\\.weight$"], "partition_type": "row"},
        {"patterns": [".*up_proj\\.weight$", ".*[qkv]_proj\\.weight$"], "partition_type": "column"},
        {"patterns": [".*lm_head\\.weight$"], "partition_type": "column", "gather_output": True},
    ],
}


WHOLE_EXPERTS = ROWS_AND_COLUMNS | {"layer_specs": [{"patterns": [".*deepspeed_experts.*"], "partition_type": "skip"}, *ROWS_AND_COLUMNS["layer_specs"]]}


class Layout(NamedTuple):
    """``world`` ranks; ``tp`` of AutoTP; ``ep`` of the MoE layer, 0 for a dense model; ZeRO stage; whether ours is in force; ``cut``: its experts are."""

    world: int = 1
    tp: int = 1
    ep: int = 0
    stage: int = 1
    ours: bool = True
    bf16: bool = False
    k: int = 2
    clip: float = 0.5
    steps: int = 3
    cut: bool = False

    def __str__(self) -> str:
        ep = f"{self.ep}{' cut' if self.cut else ''}"
        return f"{'ours' if self.ours else 'stock'} world {self.world} tp {self.tp} ep {ep} zero {self.stage}{' bf16' if self.bf16 else ''} k {self.k}"

    def first_expert(self, rank: int) -> int:
        """Of those that ``rank`` holds: groups are runs of the world, or with experts that are cut runs of equal ranks of tensor parallelism."""
        return (rank // self.tp if self.cut else rank) % self.ep * (EXPERTS // self.ep)


class Attention(nn.Module):
    """Causal, one head of 8 at a time; works on the heads that its projections have here."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.add_module(f"{name}_proj", nn.Linear(HIDDEN, HIDDEN))
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.get_submodule(f"{name}_proj")(x).unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qkv")
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    """Its bias and norm are no linears: their gradients come through autograd."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.up_proj(self.norm(x))))


class Sparse(nn.Module):
    """DeepSpeed's MoE layer over experts of the same kind."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        options = {"drop_tokens": False, "min_capacity": 0, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = MoE(HIDDEN, Dense(2 * WIDTH), num_experts=EXPERTS, ep_size=layout.ep, k=layout.k, enable_expert_tensor_parallelism=layout.cut, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, self.auxiliary, _ = self.moe(self.norm(x))
        return out


class Block(nn.Module):
    """Attention, then one of the two."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(HIDDEN), Attention()
        self.mlp = Sparse(layout) if layout.ep else Dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(layout) for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def here(rank: int, world: int) -> None:
    """What DeepSpeed wants to find in the environment; and it compiles nothing.

    Its all-reduce in shared memory would be built when the first process group starts, minutes on a busy machine, and a rank that is ended meanwhile
    leaves a lock that stops all later ones. Ours never calls it; stock falls back to gloo.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def build(rank: int, layout: Layout, kind: type[nn.Module] = Model) -> Any:
    """The same weights in every layout: experts of one layer differ, by their number in it."""
    torch.manual_seed(3)
    model = kind(layout)
    for name, parameter in model.named_parameters():
        seed = sum(name.encode())
        if "deepspeed_experts." in name:
            prefix, _, rest = name.partition("deepspeed_experts.")
            number, _, rest = rest.partition(".")
            seed = sum(f"{prefix}{rest}".encode()) * 100 + int(number) + layout.first_expert(rank)
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data += 0.1 * noise
    return model


def configuration(layout: Layout) -> dict[str, Any]:
    """Of ``deepspeed.initialize``: the global batch is always :data:`MICRO_BATCHES` micro-batches."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES * layout.tp // layout.world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "gradient_clipping": layout.clip,
        "zero_optimization": {"stage": layout.stage},
        "steps_per_print": 1000000,
    }
    if layout.bf16:
        config["bf16"] = {"enabled": True}
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": WHOLE_EXPERTS if layout.ep and not layout.cut else ROWS_AND_COLUMNS}
    return config


def batches(steps: int) -> torch.Tensor:
    """Token ids ``[steps, MICRO_BATCHES, SAMPLES, LENGTH]``."""
    return torch.randint(0, VOCAB, (steps, MICRO_BATCHES, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(11))


def train(rank: int, layout: Layout, engine: Any, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Steps over ``data`` [steps, ...]: logits of every micro-batch, and norms, by name."""
    found, mine = {}, rank // layout.tp
    here = engine.gradient_accumulation_steps()
    for step, batch in enumerate(data):
        for number in range(mine * here, (mine + 1) * here):
            ids = batch[number]
            logits = engine(ids[:, :-1])
            found[f"logits {step} {number}"] = logits.detach().clone()
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            if layout.ep:
                loss = loss + 0.01 * sum(layer.mlp.auxiliary for layer in engine.module.layers)
            engine.backward(loss)
            engine.step()
        if layout.stage:
            found[f"norm {step}"] = torch.tensor(float(engine.get_global_grad_norm()))
    return found


def weights(rank: int, layout: Layout, model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights by a name that belongs to no layout."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().clone()
        if layout.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            value = whole(parameter, layout.tp)
        if "deepspeed_experts." in name:
            prefix, _, rest = name.partition("deepspeed_experts.")
            number, _, rest = rest.partition(".")
            name = f"{prefix}{int(number) + layout.first_expert(rank)}.{rest}"
        found[name] = value
    return found


def whole(parameter: Any, tp: int) -> torch.Tensor:
    """A weight that AutoTP has cut, from all of its ranks."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    parts = [torch.empty_like(parameter.data) for _ in range(tp)]
    dist.all_gather(parts, parameter.data.contiguous(), group=groups.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=cut_of(parameter))


def cut_of(parameter: Any) -> int:
    """The axis that AutoTP has cut."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    return int(getattr(parameter, DS_AUTOTP_UC_META)["partition_dim"])


def initialize(rank: int, layout: Layout, *, keep: bool = False) -> tuple[Any, Model]:
    """The engine and its model; with ``keep`` as DeepSpeed's layers initialise it."""
    import deepspeed

    import tio_megatron as tio

    here(rank, layout.world)
    if layout.ours:
        tio.apply()
    torch.manual_seed(3)
    model = Model(layout) if keep else build(rank, layout)
    engine, *_ = deepspeed.initialize(model=model, config=configuration(layout))
    return engine, model


def train_all(rank: int, layouts: list[Layout]) -> list[dict[str, torch.Tensor]]:
    """One engine after the other in these ranks; what each gave."""
    results = []
    for layout in layouts:
        engine, model = initialize(rank, layout)
        results.append(train(rank, layout, engine, batches(layout.steps)) | weights(rank, layout, model))
        engine.destroy()
    return results


def joined(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What all ranks have, which must be the same where two have it."""
    from tio_megatron.testing import assert_same_bytes

    found: dict[str, torch.Tensor] = {}
    for theirs in ranks:
        for name, value in theirs.items():
            if name in found:
                assert_same_bytes(found[name], value, f"{name} on two ranks")
            found[name] = value
    return found

"""What vLLM's experts compute, as rows of tokens.

Ours are looked into while they run. Stock's are one fused operator: the router's choice is seen as it is handed over, and the rows are made by running the
same operator again with one expert at a time and a probability of 1, so that each sum has one term; activations likewise, with unit rows in place of the
down projections (CPU kernels only). That costs about the operator once more for either, and is done only where a point inside the experts is kept. What the
operator adds up, its rows before they are rounded, is computed anew by the diagnosis from activations and weights.

Legend: n tokens of a pass, K chosen experts of a token, E experts, H hidden, I width of an expert on this rank.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from tio_megatron.integrations.expert_rows import ExpertRows, inside
from tio_megatron.traces.scored import in_id_order


def hook_experts(stack: ExitStack, run: Any, runner: Any, here: str, sizes: Any) -> None:
    """Record one layer's experts until ``stack`` closes. ``runner``: vLLM's module that holds router and experts; ``run``: this rank's recording."""
    experts = runner.routed_experts
    (_ours if hasattr(experts, "spans") else _stock)(stack, run, experts, here, sizes)


def _choice(run: Any, here: str, ids: torch.Tensor, probabilities: torch.Tensor) -> None:
    ids, probabilities = in_id_order(ids.to(torch.int64), probabilities)
    run.put(f"{here}expert_ids", ids)
    run.put(f"{here}expert_probs", probabilities)


def _ours(stack: ExitStack, run: Any, experts: Any, here: str, sizes: Any) -> None:
    from tio_megatron.integrations.vllm import experts as router
    from tio_megatron.layers import experts_replicated

    place: Any = router
    networks: Any = experts_replicated
    original = experts.compute
    etp = 1 if experts.etp_group is None else experts.etp_group.size()
    rank = run.rank if etp > 1 else 0
    speaks = etp > 1 or len(experts.spans) > 1 or run.rank == 0

    def compute(x: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        if run.at is None or x.shape[0] != len(run.at):
            return original(x, second)
        routed, planned = place.route, networks.plan_rows
        rows: list[ExpertRows] = []

        def route(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids, probabilities = routed(*args, **kwargs)
            _choice(run, here, ids, probabilities)
            return ids, probabilities

        def plan_rows(ids: torch.Tensor, lo: int, hi: int, **kwargs: Any) -> Any:
            plan = planned(ids, lo, hi, **kwargs | {"padded": False})  # rows that nobody chose have no place in a trace
            slots = torch.zeros(plan.rows, dtype=torch.int64)
            token, slot = (plan.index >= 0).nonzero(as_tuple=True)
            slots[plan.index[token, slot]] = slot
            rows.append(ExpertRows(run.at[plan.token.cpu()], slots, ids.shape[1]))
            return plan

        def seen(what: str, value: torch.Tensor) -> None:
            if not rows or not speaks:
                return
            parts = {"gate_up": ("expert_gate", "expert_up"), "act": ("expert_act",)}.get(what, ())
            for name, part in zip(parts, value.chunk(len(parts), -1) if parts else (), strict=True):
                rows[0].put(run.writer, f"{here}{name}", part, first=rank * part.shape[-1], width=etp * part.shape[-1])

        finish = networks.expert_mlp

        def expert_mlp(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = finish(*args, **kwargs)  # complete on every rank that shares an expert
            if rows and speaks and (etp == 1 or run.rank == 0):
                rows[0].put(run.writer, f"{here}expert_out", out)
            return out

        place.route, networks.plan_rows, networks.expert_mlp = route, plan_rows, expert_mlp
        try:
            with inside(seen):
                return original(x, second)
        finally:
            place.route, networks.plan_rows, networks.expert_mlp = routed, planned, finish

    experts.compute = compute
    stack.callback(delattr, experts, "compute")


def _stock(stack: ExitStack, run: Any, experts: Any, here: str, sizes: Any) -> None:
    original = experts.forward_modular
    wanted = any(run.writer.keeps(f"{here}{part}") for part in ("expert_out", "expert_act"))

    def forward_modular(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(("x", "topk_weights", "topk_ids"), args, strict=False)) | kwargs
        x, weights, ids = given["x"], given["topk_weights"], given["topk_ids"]
        if run.at is not None and x.shape[0] == len(run.at):
            _choice(run, here, ids, weights)
            if wanted and run.ranks == 1:
                _again(run, experts, here, x, weights, ids)
        return original(*args, **kwargs)

    experts.forward_modular = forward_modular
    stack.callback(delattr, experts, "forward_modular")


def _again(run: Any, experts: Any, here: str, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Each token's experts one by one: activations [n, K, I], and rows [n, K, H] rounded as the operator rounds its sum."""
    from tio_megatron.integrations.vllm.tracing import stock_activations, stock_experts

    order = ids.argsort(dim=-1, stable=True)
    chosen = [ids.gather(1, order[:, slot : slot + 1]).contiguous() for slot in range(ids.shape[1])]
    if run.writer.keeps(f"{here}expert_act"):
        inner = [stock_activations(experts, x, one) for one in chosen]
        if all(part is not None for part in inner):
            run.writer.put(f"{here}expert_act", torch.stack([part for part in inner if part is not None], dim=1), run.at)
    if run.writer.keeps(f"{here}expert_out"):
        weight = torch.ones_like(weights[:, :1])
        rows = [stock_experts(experts, x.clone(), weight, one) for one in chosen]
        run.writer.put(f"{here}expert_out", torch.stack(rows, dim=1), run.at)

"""Planted faults of the first kind: equal inputs, another order of adding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from planted_model import Model, Plan, Sizes, pieces, tree
from planting import BF16, FP32, Draw, Stage, Truth


def ordered_product(how: str, n: int, partial: torch.dtype = FP32, start: Callable[[int, int], int] | None = None, dtype: torch.dtype | None = None):
    """A product whose ``n`` partial sums are joined in another order; ``start(row, rows)`` begins a ring."""

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = [part.to(partial) for part in pieces(x, w, n)]
        if how == "pairwise":
            return tree(parts).to(partial)
        if how == "sequential":
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total
        rows = []
        for row in range(len(x)):
            at = start(row, len(x)) if start else 0
            total = parts[at % n][row]
            for step in range(1, n):
                total = total + parts[(at + step) % n][row]
            rows.append(total)
        return torch.stack(rows)

    return product


def product_place(draw: Draw, sizes: Sizes, layer: int) -> str:
    """Some product of a layer whose inner axis ranks cut."""
    return f"layers.{layer}." + draw.choice(["o_proj", "expert_out" if sizes.moe[layer] else "mlp_out"])


def planted_product(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
    """A step for a dense product or the experts' one."""

    def step(model: Model, usual, x, w=None, ids=None, layer=None, name=None, **_):
        if ids is not None:
            return model._each(layer, name, x, ids, lambda x, w: product(x, w).to(model.sizes.dtype))
        return product(x, w).to(model.sizes.dtype)

    return step


def pieces_in_another_order(stage: Stage, draw: Draw) -> Truth:
    """1: one side adds many pieces one after another, the other pairwise."""
    n = draw.choice([5, 7, 12, 19, 24])
    sizes = draw.sizes(width=n * draw.choice([2, 3]), head_dim=2 * draw.choice([4, 8]), dtype=draw.choice([BF16, FP32]))
    layer = draw.layer(sizes)
    place = f"layers.{layer}.{'expert_out' if sizes.moe[layer] else 'mlp_out'}"
    right = Plan(steps={place: planted_product(ordered_product("pairwise", n))})
    stage.both(sizes, draw.sequences(sizes, 10, 30), Plan(steps={place: planted_product(ordered_product("sequential", n))}), right)
    return Truth("order", ("order",), (place,))


def partial_sums_in_bf16(stage: Stage, draw: Draw) -> Truth:
    """2: partial sums rounded to bf16 per rank, added in ring order."""
    sizes = draw.sizes(dtype=BF16)
    place, n = product_place(draw, sizes, draw.layer(sizes)), draw.choice([2, 4, 8])
    start = draw.randrange(n)
    stage.both(
        sizes,
        draw.sequences(sizes),
        Plan(steps={place: planted_product(ordered_product("ring", n, BF16, lambda row, rows: start))}, facts={"layout": {"tp": n}}),
    )
    return Truth("order", ("order",), (place,))


def _owners(stage: Stage, draw: Draw, from_token: bool) -> Truth:
    sizes = draw.sizes(moe=True, experts=draw.choice([8, 16]), top_k=4)
    layer, owners = draw.layer(sizes), draw.choice([4, 8])
    place = f"layers.{layer}.mlp_out"
    partial = draw.choice([FP32, sizes.dtype])

    def combine(start):
        def step(model: Model, usual, out, probs, ids, places, **_):
            weighted = out.float() * probs.float()[..., None]
            rows = []
            for row in range(len(out)):
                sums: dict[int, torch.Tensor] = {}
                for k, expert in enumerate(ids[row].tolist()):
                    owner = expert // (model.sizes.experts // owners)
                    sums[owner] = sums[owner] + weighted[row, k] if owner in sums else weighted[row, k]
                begin = start(int(places[row]))
                order = [(begin + i) % owners for i in range(owners)]
                parts = [sums[owner].to(partial) for owner in order if owner in sums]
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                rows.append(total)
            return torch.stack(rows).to(model.sizes.dtype)

        return step

    right = Plan(steps={place: combine(lambda token: 0)})
    wrong = Plan(steps={place: combine((lambda token: (token * 5 + 1) % owners) if from_token else (lambda token: (token + 1) % owners))})
    stage.both(sizes, draw.sequences(sizes, 12, 30), wrong, right)
    return Truth("order", ("order-by-owner",), (place,), least=5)


def token_owner_against_expert_owner(stage: Stage, draw: Draw) -> Truth:
    """3: the token's owner and the experts' owner reduce in different orders."""
    return _owners(stage, draw, True)


def ring_starts_at_the_owner(stage: Stage, draw: Draw) -> Truth:
    """4: reduce-scatter starts its ring at the rank that owns the token."""
    return _owners(stage, draw, False)


def sequence_parallel(stage: Stage, draw: Draw) -> Truth:
    """5: with sequence parallelism a reduce-scatter starts where the token's slice lies."""
    sizes = draw.sizes(dtype=draw.choice([BF16, FP32]))
    place, n = product_place(draw, sizes, draw.layer(sizes)), draw.choice([4, 8])
    place = place.replace("expert_out", "o_proj")
    partial = sizes.dtype
    right = Plan(steps={place: planted_product(ordered_product("ring", n, partial, lambda row, rows: 0))}, facts={"layout": {"sp": 0}})
    wrong = Plan(steps={place: planted_product(ordered_product("ring", n, partial, lambda row, rows: row * n // rows))}, facts={"layout": {"sp": 1}})
    stage.both(sizes, draw.sequences(sizes, 12, 30), wrong, right)
    return Truth("order", ("order-by-owner",), (place,), least=5)


def micro_batch(stage: Stage, draw: Draw) -> Truth:
    """14: the micro-batch of the re-computation is not the rollout's, and a kernel's blocks depend on it."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    place = f"layers.{layer}." + draw.choice(["q_proj", "o_proj", "k_proj"])
    few, many = draw.choice([(2, 4), (4, 8), (1, 8)])

    def blocks(model: Model, usual, x, w, **_):
        return ordered_product("sequential", few if len(x) < 24 else many)(x, w).to(model.sizes.dtype)

    sequences = draw.sequences(sizes, 8, 20, count=3)
    alone = [[(i, 0, len(sequence))] for i, sequence in enumerate(sequences)]
    plan = Plan(steps={place: blocks})
    stage.both(sizes, sequences, plan, plan, passes=[[runs[0] for runs in alone]], wrong_passes=alone)
    return Truth("order", ("order-by-batch",), (place,))


def size_of_the_message(stage: Stage, draw: Draw) -> Truth:
    """20: the library switches its algorithm with the size of the message."""
    sizes = draw.sizes()
    layer, n = draw.layer(sizes), draw.choice([4, 8])
    place = f"layers.{layer}." + draw.choice(["o_proj"] + ([] if sizes.moe[layer] else ["mlp_out"]))
    sequences = [[draw.randrange(sizes.vocab) for _ in range(length)] for length in (6, 8, 25, 30)]
    passes = [[(i, 0, len(sequence))] for i, sequence in enumerate(sequences)]
    partial = sizes.dtype

    def small(model: Model, usual, x, w, **_):
        return ordered_product("pairwise", n, partial)(x, w).to(model.sizes.dtype)

    def switches(model: Model, usual, x, w, **_):
        how = "pairwise" if len(x) < 16 else "ring"
        return ordered_product(how, n, partial, lambda row, rows: 1)(x, w).to(model.sizes.dtype)

    stage.both(sizes, sequences, Plan(steps={place: switches}), Plan(steps={place: small}), passes=passes)
    return Truth("order", ("order-by-size",), (place,))

"""Whether one contract can hold for a model and a pair of layouts; if not, which product forbids it and the nearest pairs that work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tio_megatron.contract import Contract, Layout, LayoutProblem, ModelShape
from tio_megatron.contract.misfits import offered
from tio_megatron.findings.finding import Finding

TOPIC = "contract"
_SIZES = ("tp", "ep", "etp", "pp", "cp")


@dataclass(frozen=True)
class Fit:
    """``contract`` serves both layouts when ``findings`` holds nothing bad; else ``nearest`` are pairs that work, the least changed first."""

    contract: Contract
    findings: tuple[Finding, ...]
    nearest: tuple[tuple[Layout, Layout], ...] = ()


def fit(
    model: ModelShape, trainer: Layout, rollout: Layout, *, contract: Contract | None = None, training: bool = True, most: int = 3, family: str = "cpu"
) -> Fit:
    """Look at every product of ``model`` that either layout cuts.

    Args:
        model: sizes.
        trainer: of one side.
        rollout: of the other.
        contract: the one to hold; the smallest that serves both by default.
        training: whether the trainer computes gradients, which have two rules more.
        most: pairs to name when this one does not work.
        family: of the smallest contract; a contract has its own.
    """
    chosen = contract or _smallest(family, trainer, rollout)
    findings = [Finding(f"trainer {trainer}: {p.where}: {p.what}", p.works, topic=TOPIC) for p in _trainer(chosen, model, trainer, training)]
    findings += [Finding(f"rollout {rollout}: {p.where}: {p.what}", p.works, topic=TOPIC) for p in chosen.problems(rollout, model, serving=True)]
    if findings:
        return Fit(chosen, tuple(findings), tuple(_nearest(model, trainer, rollout, contract, training, family))[:most])
    return Fit(chosen, (Finding(f"trainer {trainer} and rollout {rollout}: every cut falls on leaves", level="ok", topic=TOPIC),))


def _smallest(family: str, *layouts: Layout) -> Contract:
    """The smallest contract for those of ``layouts`` that leaves can serve; the others are the problems of any contract."""
    return Contract.for_layouts(*([layout for layout in layouts if layout.on_leaves] or [Layout()]), family=family)


def _trainer(contract: Contract, model: ModelShape, layout: Layout, training: bool) -> Iterator[LayoutProblem]:
    yield from contract.problems(layout, model)
    yield from _megatron(contract, model, layout, training)


def _megatron(contract: Contract, model: ModelShape, layout: Layout, training: bool) -> Iterator[LayoutProblem]:
    """What the trainer's engine asks of a layout beside the contract."""
    stage = layout.tp * layout.cp * layout.dp
    if stage % (layout.ep * layout.expert_tp):
        what = f"ep {layout.ep} times etp {layout.expert_tp} does not divide the {stage} ranks of a stage"
        yield LayoutProblem("experts", what, f"a multiple of {math.lcm(stage, layout.ep * layout.expert_tp)} ranks a stage would work")
    if training and layout.tp > model.kv_heads:
        what = f"tp {layout.tp} is above the {model.kv_heads} key/value heads: gradients of a shared head would be rounded on each of its ranks"
        sizes = [tp for tp in contract.side(model).sizes("tp", layout) if tp <= model.kv_heads]
        yield LayoutProblem("attention (training)", what, offered("tp", sizes))
    if training and model.experts and layout.tp > 1 and not layout.sp:
        yield LayoutProblem("sequence parallelism", "Megatron trains experts under tp only with it", "--sequence-parallel would work")


def _nearest(model: ModelShape, trainer: Layout, rollout: Layout, contract: Contract | None, training: bool, family: str) -> Iterator[tuple[Layout, Layout]]:
    """Pairs that work, with the trainer's number of ranks kept, in order of how far the sizes move (in doublings)."""
    trainers = sorted((layout for layout in _trainers(model, trainer) if layout.on_leaves), key=lambda layout: _distance(layout, trainer))
    rollouts = sorted(_rollouts(model, rollout), key=lambda layout: _distance(layout, rollout))

    def trains(contract: Contract, layout: Layout) -> bool:
        return contract.side(model).fits(layout) and not any(_megatron(contract, model, layout, training))

    def both_fit(left: Layout, right: Layout) -> bool:
        both = contract or _smallest(family, left, right)
        return both.side(model, serving=True).fits(right) and trains(both, left)

    # The two sides are independent once each fits its own smallest contract, unless a contract is given: leaves only grow with the pair.
    good_trainers = [layout for layout in trainers if trains(contract or _smallest(family, layout, rollout), layout)]
    pairs = []
    for left in good_trainers[:16]:
        right = next((right for right in rollouts if both_fit(left, right)), None)
        if right is not None:
            pairs.append((_distance(left, trainer) + _distance(right, rollout), left, right))
    if not pairs:  # no trainer fits beside this rollout: move the rollout too
        for by in rollouts:
            moved = next((left for left in trainers if both_fit(left, by)), None)
            if moved is not None:
                pairs.append((_distance(moved, trainer) + _distance(by, rollout), moved, by))
    yield from ((left, right) for _, left, right in sorted(pairs, key=lambda pair: pair[0]))


def _trainers(model: ModelShape, wanted: Layout) -> Iterator[Layout]:
    ranks = wanted.tp * wanted.cp * wanted.pp * wanted.dp
    sizes = [n for n in range(1, min(ranks, 64) + 1) if ranks % n == 0]
    for tp in sizes:
        for pp in (n for n in sizes if ranks % (tp * n) == 0 and model.layers % n == 0):
            for cp in {1, wanted.cp}:
                if ranks % (tp * pp * cp):
                    continue
                dp = ranks // (tp * pp * cp)
                for ep in (n for n in sizes if model.experts and model.experts % n == 0 or n == 1):
                    for etp in {1, tp, wanted.expert_tp}:
                        if (tp * cp * dp) % (ep * etp) == 0:
                            yield Layout(tp=tp, ep=ep, etp=etp, sp=tp > 1 and (wanted.sp or bool(model.experts)), pp=pp, cp=cp, dp=dp)


def _rollouts(model: ModelShape, wanted: Layout) -> Iterator[Layout]:
    for tp in (1, 2, 4, 8, 16, 32):
        for expert_parallel in (False, True) if model.experts else (False,):
            yield Layout.for_vllm(tp, expert_parallel)


def _distance(layout: Layout, wanted: Layout) -> float:
    def size(of: Layout, name: str) -> int:
        return of.expert_tp if name == "etp" else int(getattr(of, name))

    return sum(abs(math.log2(size(layout, name) / size(wanted, name))) for name in _SIZES)

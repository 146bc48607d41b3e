"""Every option of the check that hosts change no byte, checked before anything is started."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.qwen3_moe.options import Parser
from tio_megatron.contract import Contract
from tio_megatron.contract.environment import VARIABLE, from_environment
from tio_megatron.contract.words import TrainerLayout

EXAMPLES = """examples:
  bash launch/qwen3_moe.sh consistency                                        four ranks of this host, compared with one process
  NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash launch/qwen3_moe.sh consistency      two ranks on each of two hosts
  bash launch/qwen3_moe.sh consistency --layouts cp2+dp2+ep2 dp4 --steps 5    other layouts, all of the same number of ranks
  bash launch/qwen3_moe.sh consistency --layouts tp1                          one process; what it prints is for --expect elsewhere
  bash launch/qwen3_moe.sh consistency --soak 600                             ten minutes of collectives: pull a cable, and see who is told what

exit status: 0 every layout trains to the bytes of one process and every sum is the contract's; 1 something is not, or failed; 2 the input is bad;
130 interrupted. Nothing is left on disk (the launcher's folder in TMPDIR is removed): each rank makes the model, so hosts need no common file system."""

LAYOUTS = {1: ("tp1",), 2: ("tp2+ep2", "ep2", "pp2"), 4: ("tp4+ep4", "tp2+dp2+ep4", "pp2+tp2+ep2")}
"""What is trained when nothing else is said, by the number of ranks."""
SIZES = (1, 1023, 1 << 17, (1 << 17) + 1)
"""Elements a rank; of four ranks' fp32 the third is the last that the automatic choice sends by doubling (2 MiB), the fourth goes by scatter."""
BATCH = 8
"""Sequences of a step."""
COLLECTIVES = ("doubling", "scatter", "ring", "reduce_scatter", "all_gather", "all_to_all")
"""What a soak repeats: the schedules of an all-reduce, and the others."""


@dataclass(frozen=True)
class ConsistencyOptions:
    """Parsed options. ``trainer`` is the first layout, for its number of ranks; ``expect`` a digest as the job prints it, or empty; ``contract`` what
    ``TIO_CONTRACT`` names, else one that serves all layouts."""

    trainer: TrainerLayout
    layouts: tuple[str, ...]
    stock: bool
    sizes: tuple[int, ...]
    steps: int
    expect: str
    soak: float
    collectives: tuple[str, ...]
    contract: Contract


def model() -> dict[str, Any]:
    """``config.json`` of the model: large enough to be cut over four ranks in every way."""
    from tio_megatron.testing.qwen3 import MOE

    return MOE | dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=16, num_experts_per_tok=4)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = Parser(
        prog="qwen3_moe.sh consistency",
        description="Whether these hosts give the bytes of one process: sums of many sizes by every schedule, and training in several layouts.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="trained one after another (three of the number of ranks; 4 ranks unless torchrun says)")
    made.add_argument("--steps", type=int, default=2, metavar="N", help="training steps in each layout (2)")
    made.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), metavar="N", help="elements a rank of the sums (%(default)s)")
    made.add_argument("--expect", default="", metavar="DIGEST", help="what a run in one process printed, instead of one made here")
    made.add_argument("--stock", action="store_true", help="train with the package as it is: a control, whose layouts differ")
    made.add_argument("--soak", type=float, default=0.0, metavar="SECONDS", help="only collectives of changing sizes, each compared, for so long")
    made.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), metavar="NAME", help="of --soak: %(choices)s (all)")
    return made


def parse(argv: Sequence[str], world: int | None = None) -> ConsistencyOptions:
    """Options from the command line; ``world`` is torchrun's number of ranks (None: no torchrun, as many as the layouts have).

    Raises:
        ValueError: a value that cannot work, in one line.
        SystemExit: ``--help`` (status 0).
    """
    a = parser().parse_args(argv)
    if a.layouts is None and world is not None and world not in LAYOUTS:
        raise ValueError(f"consistency over {world} ranks: name the layouts (--layouts dp{world}); only those of 1, 2 and 4 are known")
    layouts = tuple(a.layouts or LAYOUTS[world or 4])
    parsed = [TrainerLayout.parse(words) for words in layouts]
    for words, layout in zip(layouts, parsed, strict=True):
        if layout.ranks != (world or parsed[0].ranks):
            there = f"{world} are started" if world else f"{layouts[0]} has {parsed[0].ranks}"
            raise ValueError(f"--layouts {words}: {layout.ranks} ranks, and {there}; all must have the same number")
    contract = _contract()
    if not a.soak:
        _check_fit(contract, layouts, parsed)
    if a.steps < 1 or any(size < 1 for size in a.sizes):
        raise ValueError(f"--steps and every one of --sizes must be at least 1, got {a.steps} and {' '.join(map(str, a.sizes))}")
    _check_room(a.sizes, parsed[0].ranks)
    if a.expect and not re.fullmatch(r"[0-9a-f]{64}", a.expect):
        raise ValueError(f"--expect must be 64 hexadecimal digits, as a run with --layouts tp1 prints them, got {a.expect[:80]!r}")
    if not 0 <= a.soak < 10_000_000:
        raise ValueError(f"--soak must be a number of seconds, got {a.soak:g}")
    return ConsistencyOptions(
        trainer=parsed[0],
        layouts=layouts,
        stock=a.stock,
        sizes=tuple(a.sizes),
        steps=a.steps,
        expect=a.expect,
        soak=a.soak,
        collectives=tuple(a.collectives),
        contract=contract,
    )


def _contract() -> Contract:
    named, vocab = from_environment(), model()["vocab_size"]
    if named is not None and named.vocab_size not in (None, vocab):
        raise ValueError(f"{VARIABLE}: vocab_size is {named.vocab_size}, the model of this check has {vocab}; leave it out")
    return Contract(grain=32) if named is None else named.contract


def _check_room(sizes: Sequence[int], ranks: int) -> None:
    """Refuse sums that this machine's memory cannot hold: a rank has the parts of all, and as many results as there are schedules."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = 4 * max(sizes, default=0) * ranks * (ranks + 4)
    if need > memory:
        raise ValueError(
            f"--sizes {max(sizes)}: each of {ranks} ranks would need {need / 2**30:.3g} GiB, this machine has {memory / 2**30:.3g}; name smaller ones"
        )


def _check_fit(contract: Contract, layouts: Sequence[str], parsed: Sequence[TrainerLayout]) -> None:
    from tio_megatron.checkpoint import CheckpointConfig

    shape = CheckpointConfig.from_dict(model()).shape
    for words, layout in zip(layouts, parsed, strict=True):
        found = [str(problem) for problem in contract.problems(layout.layout, shape)]
        if BATCH % layout.layout.dp:
            found.append(f"a batch of {BATCH} sequences does not divide by {layout.layout.dp} replicas")
        if found:
            named = f" ({VARIABLE} names the contract)" if from_environment() is not None else ""
            raise ValueError(f"--layouts {words}: {'; '.join(found)}{named}")

"""The check that hosts change no byte: collectives and training over these ranks, compared with one process.

Started by ``launch/qwen3_moe.sh consistency`` on every rank; on one host, or on each of several.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.qwen3_moe.options import make_parser
from examples.qwen3_moe.start import enter
from tio_megatron.contract import Contract
from tio_megatron.contract.environment import VARIABLE, from_environment
from tio_megatron.contract.words import TrainerLayout
from tio_megatron.jobs.children import without_ranks

if TYPE_CHECKING:
    from examples.qwen3_moe.report import Screen
    from examples.qwen3_moe.training import Training
    from tio_megatron.checkpoint import Weights
    from tio_megatron.jobs.ranks import Ranks

EXAMPLES = """examples:
  bash launch/qwen3_moe.sh consistency                                        four ranks of this host, compared with one process
  NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash launch/qwen3_moe.sh consistency      two ranks on each of two hosts
  bash launch/qwen3_moe.sh consistency --layouts cp2+dp2+ep2 dp4 --steps 5    other layouts, all of the same number of ranks
  bash launch/qwen3_moe.sh consistency --layouts tp1                          one process; what it prints is for --expect elsewhere
  bash launch/qwen3_moe.sh consistency --soak 600                             ten minutes of collectives: pull a cable, and see who is told what

exit status: 0 every layout trains to the bytes of one process and every sum is the contract's; 1 something is not, or failed; 2 the input is bad;
130 interrupted. Nothing is left on disk: each rank makes the model, so hosts need no common file system."""

LAYOUTS = {1: ("tp1",), 2: ("tp2+ep2", "ep2", "pp2"), 4: ("tp4+ep4", "tp2+dp2+ep4", "pp2+tp2+ep2")}
"""What is trained when nothing else is said, by the number of ranks."""
SIZES = (1, 1023, 1 << 17, (1 << 17) + 1)
"""Elements a rank; of four ranks' fp32 the third is the last that the automatic choice sends by doubling (2 MiB), the fourth goes by scatter."""
ALONE_SECONDS = 900
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

    @property
    def begins_with(self) -> str:
        """What the job does first and how long that usually takes, in words."""
        return f"collectives for {self.soak:g} seconds follow" if self.soak else "sums and training follow, about a minute for four ranks on two cores"


def model() -> dict[str, Any]:
    """``config.json`` of the model: large enough to be cut over four ranks in every way."""
    from tio_megatron.testing.qwen3 import MOE

    return MOE | dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=16, num_experts_per_tok=4)


def parser() -> argparse.ArgumentParser:
    """The options."""
    what = "Whether these hosts give the bytes of one process: sums of many sizes by every schedule, and training in several layouts."
    made = make_parser("qwen3_moe.sh consistency", what, EXAMPLES)
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
    if a.expect and not re.fullmatch(r"[0-9a-f]{64}", a.expect):
        raise ValueError(f"--expect must be 64 hexadecimal digits, as a run with --layouts tp1 prints them, got {a.expect[:80]!r}")
    if not 0 <= a.soak < 10_000_000:
        raise ValueError(f"--soak must be a number of seconds, got {a.soak:g}")
    sizes, collectives = tuple(a.sizes), tuple(a.collectives)
    return ConsistencyOptions(parsed[0], layouts, a.stock, sizes, a.steps, a.expect, a.soak, collectives, contract)


def _contract() -> Contract:
    named, vocab = from_environment(), model()["vocab_size"]
    if named is not None and named.vocab_size not in (None, vocab):
        raise ValueError(f"{VARIABLE}: vocab_size is {named.vocab_size}, the model of this check has {vocab}; leave it out")
    return Contract(grain=32) if named is None else named.contract


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check on this rank.

    Returns:
        0 the bytes of one process everywhere; 1 some differ; 2 the input is bad; 130 interrupted. An error is raised.
    """
    return enter(argv, parse, _work)


def _work(options: ConsistencyOptions, ranks: Ranks, screen: Screen) -> int:
    hosts = len(set(ranks.gather(_host())))
    places = f"{ranks.size} rank{'s' * (ranks.size > 1)} on {hosts} host{'s' * (hosts > 1)}"
    if options.soak:
        return _soak(options, ranks, screen, places)
    from examples.qwen3_moe.consistency_sums import sums

    right = 0
    for elements in options.sizes:
        found = sums(elements)
        right += found.equal
        differing = [name for name, digest in found.found.items() if digest != found.tree]
        ours = f"{found.tree[:16]} by every schedule" if found.equal else f"{found.tree[:16]}, other bytes by {', '.join(differing)}"
        vendor = "the same" if found.vendor == found.tree else found.vendor[:16]
        screen.say(f"sum of {elements * ranks.size} numbers over {places}: {ours}; torch's own all-reduce: {vendor}")
    from tio_megatron.testing.qwen3 import tiny_weights

    weights, digests = tiny_weights(model()), {}  # by its seed the same wherever it is made: hosts need no common file system
    for words in options.layouts:
        with screen.bar(words, options.steps) as advance:
            digests[words] = trained(weights, words, options.steps, None if options.stock else options.contract, lambda done: advance(done, ""))
            advance(options.steps, digests[words])
    expect = options.expect or (digests[options.layouts[0]] if ranks.size == 1 else ranks.from_first(lambda: _alone(options)))
    same = sum(digest == expect for digest in digests.values())
    what = "weights, Adam's moments and log-probabilities" if not options.stock else "stock, weights and Adam's moments"
    if ranks.first:
        sizes = f"; the tree's in {right} of {len(options.sizes)} sizes" if options.sizes else ""
        print(f"{places}: the bytes of one process in {same} of {len(digests)} layouts ({what}; {options.steps} steps, {expect}){sizes}", flush=True)
    return 0 if same == len(digests) and right == len(options.sizes) else 1


def _soak(options: ConsistencyOptions, ranks: Ranks, screen: Screen, places: str) -> int:
    from examples.qwen3_moe.consistency_sums import soak

    def began() -> None:
        if ranks.first:
            print(f"{places}: every collective has come back once", flush=True)

    count, wrong = soak(options.collectives, options.soak, began)
    wrong = sum(ranks.gather(wrong))
    if ranks.first:
        print(f"{places}: {count} collectives in {options.soak:g} s, {wrong} with other bytes", flush=True)
    return 0 if not wrong else 1


def trained(weights: Weights, words: str, steps: int, contract: Contract | None, told: Callable[[int], None] = lambda done: None) -> str:
    """One digest of everything trained in a layout over all ranks and (under the contract) of log-probabilities afterwards; the ranks agree on it.

    ``told`` is called after each step with how many are done.
    """
    from examples.qwen3_moe.training import Recipe, Training
    from examples.qwen3_moe.training import parse as cut

    run = Training(Recipe(weights, steps=steps, samples=BATCH, warmup=1, lr=5e-3), cut(words), contract)
    for done in range(1, steps + 1):
        run.step()
        told(done)
    made = run.sha256()
    if contract is not None:
        made = hashlib.sha256(f"{made} {_scored(run)}".encode()).hexdigest()
    run.close()
    return made


def _scored(run: Training) -> str:
    """The digest of the log-probabilities of some sequences; the last pipeline stage has them."""
    import torch
    import torch.distributed as dist

    from examples.qwen3_moe.consistency_sums import digest
    from tio_megatron.integrations.megatron.scoring.logprobs import token_logprobs

    made = torch.Generator().manual_seed(7)
    sequences = [torch.randint(0, run.config.shape.vocab, (length,), generator=made).tolist() for length in (5, 33, 18, 2)]
    scores = token_logprobs(run.model, sequences)
    mine = None if scores is None else digest(torch.cat(scores.logprobs))
    everybody: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    found = {each for each in everybody if each is not None}
    if len(found) != 1:
        raise RuntimeError(f"the ranks have different log-probabilities: {sorted(found)}")
    return found.pop()


def _alone(options: ConsistencyOptions) -> str:
    """What a process without others trains: this program again, of one rank (rank 0 starts it, the others wait).

    Raises:
        RuntimeError: it did not end well.
    """
    start = f"from tio_megatron.jobs import children; children.end_with_parent({os.getpid()}); "
    start += "from examples.qwen3_moe.consistency import main; raise SystemExit(main())"
    words = [sys.executable, "-W", "ignore", "-c", start, "--layouts", "tp1", "--steps", str(options.steps), "--sizes"]
    words += ["--stock"] if options.stock else []
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(words, env=without_ranks(os.environ), cwd=root, capture_output=True, text=True, timeout=ALONE_SECONDS)
    said = re.search(r" ([0-9a-f]{64})\)$", done.stdout.strip())
    if done.returncode or said is None:
        raise RuntimeError(f"the run in one process ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return said[1]


def _host() -> str:
    """What tells this rank's host from others: its kernel and its network, since names of hosts need not differ."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"


if __name__ == "__main__":
    sys.exit(main())

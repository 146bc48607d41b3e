"""The check that hosts change no byte: collectives and training over these ranks, compared with one process.

Started by ``launch/qwen3_moe.sh consistency`` on every rank; on one host, or on each of several.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from examples.qwen3_moe.consistency_options import BATCH, ConsistencyOptions, model, parse
from examples.qwen3_moe.entry import enter

if TYPE_CHECKING:
    from examples.qwen3_moe.screen import Advance, Screen
    from examples.qwen3_moe.training import Training
    from examples.qwen3_moe.world import World
    from tio_megatron.checkpoint import Weights
    from tio_megatron.contract import Contract

ALONE_SECONDS = 900
LINE_SECONDS = 20.0
"""Between two lines of a long training, where no terminal shows a bar."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check on this rank.

    Returns:
        0 the bytes of one process everywhere; 1 some differ, or something failed; 2 the input is bad; 130 interrupted.
    """
    return enter(argv, parse, _work)


def _work(options: ConsistencyOptions, world: World, screen: Screen) -> int:
    hosts = len(set(world.gather(_host())))
    places = f"{world.size} rank{'s' * (world.size > 1)} on {hosts} host{'s' * (hosts > 1)}"
    if options.soak:
        return _soak(options, world, screen, places)
    from examples.qwen3_moe.consistency_sums import sums

    right = 0
    for elements in options.sizes:
        found = sums(elements)
        right += found.equal
        differing = [name for name, digest in found.found.items() if digest != found.tree]
        ours = f"{found.tree[:16]} by every schedule" if found.equal else f"{found.tree[:16]}, other bytes by {', '.join(differing)}"
        vendor = "the same" if found.vendor == found.tree else found.vendor[:16]
        screen.say(f"sum of {elements * world.size} numbers over {places}: {ours}; torch's own all-reduce: {vendor}")
    from tio_megatron.testing.qwen3 import tiny_weights

    weights, digests = tiny_weights(model()), {}  # by its seed the same wherever it is made: hosts need no common file system
    for words in options.layouts:
        with screen.bar(words, options.steps) as advance:
            digests[words] = trained(weights, words, options.steps, None if options.stock else options.contract, _told(words, options.steps, advance, screen))
            advance(options.steps, digests[words])
    expect = options.expect or (digests[options.layouts[0]] if world.size == 1 else world.from_first(lambda: _alone(options)))
    same = sum(digest == expect for digest in digests.values())
    what = "weights, Adam's moments and log-probabilities" if not options.stock else "stock, weights and Adam's moments"
    if world.first:
        sizes = f"; the tree's in {right} of {len(options.sizes)} sizes" if options.sizes else ""
        print(f"{places}: the bytes of one process in {same} of {len(digests)} layouts ({what}; {options.steps} steps, {expect}){sizes}", flush=True)
    return 0 if same == len(digests) and right == len(options.sizes) else 1


def _soak(options: ConsistencyOptions, world: World, screen: Screen, places: str) -> int:
    from examples.qwen3_moe.consistency_sums import soak

    def began() -> None:
        if world.first:
            print(f"{places}: every collective has come back once", flush=True)

    count, wrong = soak(options.collectives, options.soak, began)
    wrong = sum(world.gather(wrong))
    if world.first:
        print(f"{places}: {count} collectives in {options.soak:g} s, {wrong} with other bytes", flush=True)
    return 0 if not wrong else 1


def _told(words: str, steps: int, advance: Advance, screen: Screen) -> Callable[[int], None]:
    """What is shown after each step: the bar on a terminal, elsewhere a line now and then."""
    last = [time.monotonic()]

    def told(done: int) -> None:
        advance(done, "")
        if not screen.console.is_terminal and time.monotonic() - last[0] > LINE_SECONDS:
            last[0] = time.monotonic()
            screen.say(f"{words}: step {done} of {steps}")

    return told


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
    from tio_megatron.integrations.megatron.scoring import token_logprobs

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
    from examples.qwen3_moe.children import without_ranks

    start = f"from examples.qwen3_moe import children, consistency; children.end_with_parent({os.getpid()}); raise SystemExit(consistency.main())"
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

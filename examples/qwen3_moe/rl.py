"""Reinforcement learning, exactly on policy: GRPO on checkable tasks, sampled by vLLM and learned by Megatron in another layout.

This is the entry, started by ``launch/qwen3_moe.sh rl`` on every rank; the steps are in :mod:`examples.qwen3_moe.rl_loop`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from examples.qwen3_moe.entry import enter, prepared
from examples.qwen3_moe.rl_options import RlOptions, parse

if TYPE_CHECKING:
    from examples.qwen3_moe.screen import Screen
    from examples.qwen3_moe.world import World


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loop on this rank.

    Returns:
        0 on policy in every step (a stock run: it came to its end); 1 some step was not, or something failed; 2 the input is bad; 130 interrupted.
    """
    return enter(argv, parse, _work)


def _work(options: RlOptions, world: World, screen: Screen) -> int:
    from examples.qwen3_moe.rl_loop import Loop
    from examples.qwen3_moe.rl_metrics import on_policy, sentence
    from examples.qwen3_moe.rl_plot import draw
    from examples.qwen3_moe.rl_start import starting_point

    with contextlib.ExitStack() as until:
        contract, (stage,), scratch = world.from_first(lambda: prepared(options.job, until))
        start, words = starting_point(options, stage, contract, world, screen)
        steps = Loop(options, world, screen, words, start, scratch, None if options.stock else contract).run()

        def finish() -> int:
            draw(options.job.picture or options.job.out)
            print(sentence(steps, options.stock), flush=True)
            return 0 if options.stock or all(map(on_policy, steps)) else 1

        return world.from_first(finish)


if __name__ == "__main__":
    sys.exit(main())

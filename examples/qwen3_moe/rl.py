"""Reinforcement learning, exactly on policy: GRPO on checkable tasks, sampled by vLLM and learned by Megatron in another layout.

This is the entry, started by ``launch/qwen3_moe.sh rl`` on every rank, and its options; the steps are in :mod:`examples.qwen3_moe.rl_loop`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.qwen3_moe.options import Options, check_shared, make_parser, shared_options, shared_values, trainer_of
from examples.qwen3_moe.start import enter, prepared
from examples.qwen3_moe.tasks import TASKS
from tio_megatron.contract.words import RolloutLayout, TrainerLayout

if TYPE_CHECKING:
    from examples.qwen3_moe.report import Screen
    from tio_megatron.jobs.ranks import Ranks

EXAMPLES = """examples:
  bash launch/qwen3_moe.sh rl                                          40 steps: trainer TP 2 EP 2 on two ranks, rollout TP 1
  torchrun --nproc-per-node 2 launch/qwen3_moe.sh rl                   the same, started by torchrun
  torchrun launch/qwen3_moe.sh rl --steps 10                           one rank
  bash launch/qwen3_moe.sh rl --ep 2 --tp 1 --rollout tp2+ep           other layouts: the same run, number by number
  bash launch/qwen3_moe.sh rl --task reverse --temperature 0.8         another task, another temperature on both sides
  bash launch/qwen3_moe.sh rl --save-every 10 --steps 20               checkpoints; later: rl --resume --steps 40
  bash launch/qwen3_moe.sh rl --keep-rollouts                          a store of rollouts; then: tio rollouts show out/rl/rollouts
  bash launch/qwen3_moe.sh rl --stock                                  the same loop with the packages as they are: off policy from the first step
  bash launch/qwen3_moe.sh rl --model ~/Qwen3-30B-A3B                  your own HF folder, with its tokenizer

Every step appends a line to metrics.jsonl and to TensorBoard's event file in --out; rl.png shows both kinds of run.

exit status: 0 on policy in every step (with --stock: the run came to its end); 1 some step was not, or something failed; 2 the input is bad
(one line says what); 130 interrupted. Under your own torchrun every failure is torchrun's 1."""


@dataclass(frozen=True)
class RlOptions:
    """Parsed options. ``job`` holds what this job has in common with the main one."""

    job: Options
    rollout: RolloutLayout
    task: str
    steps: int
    prompts: int
    samples: int
    minibatches: int
    clip: float
    clip_high: float
    warm_steps: int
    save_every: int
    keep_rollouts: bool
    resume: bool
    stock: bool

    @property
    def settings(self) -> dict[str, object]:
        """What decides every later step, besides the weights."""
        names = ("task", "prompts", "samples", "minibatches", "clip", "clip_high")
        common = ("max_new_tokens", "temperature", "lr", "clip_grad", "seed")
        return {name: getattr(self, name) for name in names} | {name: getattr(self.job, name) for name in common}

    @property
    def trainer(self) -> TrainerLayout:
        """The trainer's layout."""
        return self.job.trainer

    @property
    def begins_with(self) -> str:
        """What the job does first and how long that usually takes, in words."""
        return self.job.begins_with


def parser(world: int | None = None) -> argparse.ArgumentParser:
    """The options; one rank of torchrun's trains TP 1 if nothing else is said."""
    what = "GRPO on tasks whose answers can be checked: vLLM samples, Megatron learns, and every step is exactly on policy."
    made = make_parser("qwen3_moe.sh rl", what, EXAMPLES)
    size = 1 if world == 1 else 2
    model = shared_options(made, tp=size, ep=size, micro_batch=64, lr=1e-3)
    what = "steps that show the task with its answers before reinforcement learning (40; with --model 0)"
    model.add_argument("--warm-steps", type=int, metavar="N", help=what)
    add = made.add_argument_group("reinforcement learning").add_argument
    add("--rollout", default="tp1", metavar="LAYOUT", help="vLLM's layout: tpN or tpN+ep (tp1)")
    add("--task", choices=sorted(TASKS), default="sort", help="letters to sort or to reverse, numbers to add (sort)")
    add("--steps", type=int, default=40, metavar="N", help="steps of push, sample, grade, learn (40)")
    add("--prompts", type=int, default=32, metavar="N", help="prompts of a step (32)")
    add("--samples", type=int, default=8, metavar="N", help="samples of each prompt: the group that advantages compare (8)")
    add("--max-new-tokens", type=int, default=8, metavar="N", help="longest response (8)")
    add("--temperature", type=float, default=1.0, help="of the sampling, and of the trainer's log-probabilities (1.0)")
    add("--minibatches", type=int, default=1, metavar="N", help="optimizer steps on the samples of a step; only the first is on policy (1)")
    add("--clip", type=float, default=0.2, help="how far below 1 the importance ratio counts (0.2)")
    add("--clip-high", type=float, default=0.28, help="how far above 1 (0.28)")
    add("--save-every", type=int, default=0, metavar="N", help="checkpoints of the training below --out, every N steps (0: none)")
    add("--keep-rollouts", action="store_true", help="keep every step's rollouts in rollouts/ below --out, to be scored again or drawn from: tio rollouts")
    add("--resume", action="store_true", help="go on from the newest checkpoint below --out, in any layout; the numbers are those of one run")
    add("--stock", action="store_true", help="the packages as they are, without tio_megatron; writes to stock/ below --out")
    add("--out", type=Path, default=Path("out/rl"), metavar="DIR", help="metrics.jsonl, event files, rl.png, logs (out/rl)")
    return made


def parse(argv: Sequence[str], world: int | None = None) -> RlOptions:
    """Options from the command line; ``world`` is torchrun's number of ranks (None: no torchrun, the fewest that fit).

    Raises:
        ValueError: a value that cannot work, in one line.
        SystemExit: ``--help`` (status 0).
    """
    a = parser(world).parse_args(argv)
    trainer, rollout = trainer_of(a, world), RolloutLayout.parse(a.rollout)
    if a.stock and (a.cp > 1 or rollout.expert_parallel):
        raise ValueError("--stock: on a CPU the packages alone have neither context parallelism (--cp) nor experts spread over vLLM's ranks (+ep)")
    if a.stock and (a.resume or a.save_every):
        raise ValueError("--stock: checkpoints of a training need tio_megatron; leave out --resume and --save-every")
    warm = a.warm_steps if a.warm_steps is not None else (0 if a.model is not None else 40)
    least = {"--steps": 1, "--prompts": 1, "--samples": 2, "--max-new-tokens": 1, "--minibatches": 1, "--save-every": 0}
    check_shared(a, {name: (getattr(a, name[2:].replace("-", "_")), value) for name, value in least.items()} | {"--warm-steps": (warm, 0)})
    if not (0 < a.clip <= 1 and 0 < a.clip_high < math.inf):
        raise ValueError(f"--clip must be in (0, 1] and --clip-high above 0, got {a.clip} and {a.clip_high}")
    if a.prompts % a.minibatches:
        raise ValueError(f"--minibatches {a.minibatches} does not divide the {a.prompts} prompts of a step")
    # A model made here has a contract that serves two ranks on either side, so that the run is the same in all of these layouts.
    served = ((TrainerLayout.parse("tp2+ep2"),), (RolloutLayout.parse("tp2"),)) if a.model is None else ((), ())
    job = Options(
        trainer=trainer,
        trainers=(trainer, *served[0]),
        rollouts=(rollout, *served[1]),
        prompts=None,
        rounds=1,
        max_new_tokens=a.max_new_tokens,
        pretrain_steps=a.pretrain_steps,
        pretrain_seconds=600.0,
        train=True,
        control=False,
        quick=True,
        out=a.out / "stock" if a.stock else a.out,
        picture=a.out if a.stock else None,
        **shared_values(a, "tiny"),  # type: ignore[arg-type]
    )
    same = ("task", "steps", "prompts", "samples", "minibatches", "clip", "clip_high", "save_every", "keep_rollouts", "resume", "stock")
    return RlOptions(job=job, rollout=rollout, warm_steps=warm, **{name: getattr(a, name) for name in same})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loop on this rank.

    Returns:
        0 on policy in every step (a stock run: it came to its end); 1 some step was not; 2 the input is bad; 130 interrupted. An error is raised.
    """
    return enter(argv, parse, _work)


def _work(options: RlOptions, ranks: Ranks, screen: Screen) -> int:
    from examples.qwen3_moe.rl_loop import Loop
    from examples.qwen3_moe.rl_metrics import draw, on_policy, sentence
    from examples.qwen3_moe.rl_start import starting_point

    with contextlib.ExitStack() as until:
        contract, (stage,), scratch = ranks.from_first(lambda: prepared(options.job, until))
        start, words = starting_point(options, stage, contract, ranks, screen)
        steps = Loop(options, ranks, screen, words, start, scratch, None if options.stock else contract).run()

        def finish() -> int:
            draw(options.job.picture or options.job.out)
            print(sentence(steps, options.stock), flush=True)
            return 0 if options.stock or all(map(on_policy, steps)) else 1

        return ranks.from_first(finish)


if __name__ == "__main__":
    sys.exit(main())

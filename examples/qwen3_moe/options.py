"""Every option of the main job, and those that the other jobs share; checked before anything is started."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tio_megatron.contract.words import DISPATCHERS, RolloutLayout, TrainerLayout

EXAMPLES = """examples:
  bash launch/qwen3_moe.sh --quick                                   two minutes: one rollout layout, a smaller table
  bash launch/qwen3_moe.sh --tp 2 --ep 2                             train on two ranks, sample with vLLM, compare all layouts
  torchrun --nproc-per-node 2 launch/qwen3_moe.sh --tp 2 --ep 2      the same, started by torchrun
  bash launch/qwen3_moe.sh --model ~/Qwen3-30B-A3B --rounds 1        your own HF folder
  bash launch/qwen3_moe.sh --checkpoint slice --num-layers 2         the true widths of Qwen3-30B-A3B, random weights
  bash launch/qwen3_moe.sh --trainers tp1 tp4+ep4 --rollouts tp2+ep  choose the table
  bash launch/qwen3_moe.sh --prompts my.jsonl                        lines of {"text": ...} or {"tokens": [...]}

exit status: 0 every pair has logdiff 0; 1 some pair has not, or something failed; 2 the input is bad (one line says what);
130 interrupted. Under your own torchrun every failure is torchrun's 1."""

TRAINERS = ("tp1", "tp2+ep2", "ep2+allgather", "pp2+ep2")
ROLLOUTS = ("tp1", "tp2", "tp2+ep")
MOST_LAYERS = {"tiny": 128, "slice": 4}
MOST_SEED = 2**63 - 1
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Options:
    """Parsed options. ``picture`` is where the job draws its picture, if not in ``out``."""

    trainer: TrainerLayout
    trainers: tuple[TrainerLayout, ...]
    rollouts: tuple[RolloutLayout, ...]
    checkpoint: str
    model: Path | None
    num_layers: int
    dtype: str
    prompts: Path | None
    rounds: int
    max_new_tokens: int
    temperature: float
    pretrain_steps: int
    pretrain_seconds: float
    lr: float
    clip_grad: float
    micro_batch_size: int
    seed: int
    train: bool
    control: bool
    quick: bool
    out: Path
    cache: Path
    picture: Path | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those that the job writes results to: its own from beginning to end."""
        return (self.out,) if self.picture is None else (self.picture, self.out)

    @property
    def begins_with(self) -> str:
        """What the job does first and how long that usually takes, in words."""
        if self.model is not None or self.checkpoint == "slice" or not self.pretrain_steps:
            return "the first round follows in about a minute"
        usual = f"{math.ceil(self.pretrain_seconds)} seconds at most" if self.quick else f"about {math.ceil(self.pretrain_steps / 120)} minutes on two cores"
        return f"{self.checkpoint} is pre-trained first, {usual} (once: it is kept in {self.cache})"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        """Like any other bad input."""
        raise ValueError(f"{message.removeprefix('argument ')} (--help lists the options)")


def make_parser(prog: str, description: str, examples: str) -> Parser:
    """An empty parser with a page of help that ends in examples."""
    return Parser(prog=prog, description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)


def _number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not (fits(value) and value < math.inf):
            raise argparse.ArgumentTypeError(f"must be a finite number{what}, got {text}")
        return value

    read.__name__ = "float"  # what argparse calls the type of a word that is no number
    return read


def parser() -> argparse.ArgumentParser:
    """The options; those of Megatron keep Megatron's names."""
    what = "Train a Qwen3-MoE model with Megatron, sample it with vLLM, and compare every token's log-probability byte for byte."
    made = make_parser("qwen3_moe.sh", what, EXAMPLES)
    which = "one made here: tiny (pre-trained; the default), or slice (Qwen3-30B-A3B widths)"
    shared_options(made).add_argument("--checkpoint", choices=("tiny", "slice"), help=which)
    add = made.add_argument_group("job").add_argument
    add("--quick", action="store_true", help="within two minutes on two cores: rollout TP 1, fewer prompts, capped pre-training")
    add("--rounds", type=int, default=3, metavar="N", help="sample, score, train, push (3)")
    which = 'JSON lines of {"text": ...} or {"tokens": [...]} (default: 1 token to several pages, from the corpus)'
    add("--prompts", type=Path, metavar="FILE", help=which)
    add("--max-new-tokens", type=int, metavar="N", help="tokens sampled for each prompt (32; --quick 16)")
    add("--temperature", type=float, default=0.8, help="of the sampled half of the requests; the other half is greedy (0.8)")
    which = f"further layouts of the table, may be given several times ({' '.join(TRAINERS)})"
    add("--trainers", nargs="+", action="extend", metavar="LAYOUT", help=which)
    which = f"rollout layouts, the first runs the rounds; may be given several times ({' '.join(ROLLOUTS)})"
    add("--rollouts", nargs="+", action="extend", metavar="LAYOUT", help=which)
    add("--no-train", action="store_true", help="only sample and score, with the weights as they are")
    add("--no-control", action="store_true", help="leave out the stock packages")
    add("--out", type=Path, default=Path("out/qwen3_moe"), metavar="DIR", help="report.json, logdiff.png, logs (out/qwen3_moe)")
    return made


def shared_options(made: argparse.ArgumentParser, *, tp: int = 1, ep: int = 1, micro_batch: int = 2, lr: float = 1e-3) -> argparse._ArgumentGroup:
    """What every job of this folder takes: the trainer's layout, its step, and the checkpoint; returns the last group."""
    add = made.add_argument_group("Megatron (the layout of the ranks that train; names as in Megatron-LM)").add_argument
    add("--tensor-model-parallel-size", "--tp", type=int, default=tp, dest="tp", metavar="N", help=f"tensor parallel size ({tp})")
    add("--expert-model-parallel-size", "--ep", type=int, default=ep, dest="ep", metavar="N", help=f"expert parallel size ({ep})")
    add("--expert-tensor-parallel-size", "--etp", type=int, dest="etp", metavar="N", help="tensor parallel size inside experts (1 with --ep, else --tp)")
    add("--pipeline-model-parallel-size", "--pp", type=int, default=1, dest="pp", metavar="N", help="pipeline stages (1)")
    add("--context-parallel-size", "--cp", type=int, default=1, dest="cp", metavar="N", help="context parallel size (1)")
    add("--sequence-parallel", "--sp", action="store_true", dest="sp", help="always on when --tp is above 1: Megatron trains experts no other way")
    add("--moe-token-dispatcher-type", choices=DISPATCHERS, default="alltoall", dest="dispatcher", help="how tokens reach experts (alltoall)")
    add("--micro-batch-size", type=int, default=micro_batch, metavar="N", help=f"sequences per micro-batch ({micro_batch})")
    add("--lr", type=_number(" above 0", lambda value: value > 0), default=lr, help=f"learning rate of Adam ({lr})")
    add("--clip-grad", type=_number(", 0 (no clipping) or above", lambda value: value >= 0), default=1.0, help="largest gradient norm (1.0)")
    add("--seed", type=int, default=1, help="of weights, prompts and sampling (1)")
    model = made.add_argument_group("checkpoint")
    model.add_argument("--model", type=Path, metavar="DIR", help="your own HF folder of Qwen3-MoE or Qwen3 (config.json, *.safetensors)")
    model.add_argument("--num-layers", type=int, metavar="N", help="layers of the checkpoint made here (tiny 4, slice 1)")
    model.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights of the checkpoint made here")
    model.add_argument("--pretrain-steps", type=int, default=300, metavar="N", help="steps that tiny is pre-trained with our Megatron (300; with --quick 30)")
    return model


def trainer_of(a: argparse.Namespace, world: int | None) -> TrainerLayout:
    """The trainer's layout; ``world`` ranks (None: the fewest that fit).

    Raises:
        ValueError: sizes that do not fit each other, or the ranks.
    """
    sizes = dict(tp=a.tp, ep=a.ep, etp=a.etp, pp=a.pp, cp=a.cp, sp=True if a.sp else None, dispatcher=a.dispatcher)
    trainer = TrainerLayout.of(**sizes)
    if world is not None and world != trainer.ranks:
        per_replica = a.tp * a.pp * a.cp
        if world % per_replica:
            product = f"tp {a.tp} times pp {a.pp} times cp {a.cp}"
            raise ValueError(f"{world} ranks do not divide by {product}; start {trainer.ranks} (torchrun --nproc-per-node {trainer.ranks})")
        trainer = TrainerLayout.of(**sizes, dp=world // per_replica)
    return trainer


def check_shared(a: argparse.Namespace, least_of: Mapping[str, tuple[int, int]], more: str = "") -> None:
    """Refuse values that cannot work: of :func:`shared_options`, of ``least_of`` (name, value and the least it may be), and a temperature below which vLLM
    is greedy, where the trainer's scores would not be.

    Raises:
        ValueError: names the option and what would work.
    """
    common = {"--micro-batch-size": (a.micro_batch_size, 1), "--pretrain-steps": (a.pretrain_steps, 0), "--seed": (a.seed, 0)}
    for name, (value, least) in {**least_of, **common}.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if a.seed > MOST_SEED:
        raise ValueError(f"--seed must be at most {MOST_SEED} (2**63 - 1), got {a.seed}")
    if a.model is not None and not a.model.is_dir():
        raise ValueError(f"--model {a.model}: no such folder")
    made = [name for name, value in (("--checkpoint", getattr(a, "checkpoint", None)), ("--num-layers", a.num_layers)) if value is not None]
    if a.model is not None and made:
        raise ValueError(f"--model and {' and '.join(made)}: a folder of your own has its layers; leave out --model or the other")
    if not LEAST_TEMPERATURE <= a.temperature < math.inf:
        raise ValueError(f"--temperature must be above 0 and finite, at least {LEAST_TEMPERATURE:g}, got {a.temperature}{more}")


def shared_values(a: argparse.Namespace, checkpoint: str) -> dict[str, object]:
    """The fields of :class:`Options` that every job takes over from its command line.

    Raises:
        ValueError: a number of layers that ``checkpoint`` does not have, or a home folder that is not there.
    """
    layers = a.num_layers if a.num_layers is not None else (4 if checkpoint == "tiny" else 1)
    if not 1 <= layers <= MOST_LAYERS[checkpoint]:
        raise ValueError(f"--num-layers {layers}: {checkpoint} has 1 to {MOST_LAYERS[checkpoint]} layers")
    cache = Path(os.environ.get("TIO_CACHE") or "~/.cache/tio_megatron")
    try:
        cache = cache.expanduser()
    except RuntimeError as error:
        raise ValueError(f"TIO_CACHE {cache}: there is no such home folder; name a folder by its path") from error
    same = ("model", "dtype", "temperature", "lr", "clip_grad", "micro_batch_size", "seed")
    return {name: getattr(a, name) for name in same} | {"checkpoint": checkpoint, "num_layers": layers, "cache": cache}


def parse(argv: Sequence[str], world: int | None = None) -> Options:
    """Options from the command line; ``world`` is torchrun's number of ranks (None: no torchrun, the fewest that fit).

    Raises:
        ValueError: a value that cannot work, in one line.
        SystemExit: ``--help`` (status 0).
    """
    a = parser().parse_args(argv)
    trainer = trainer_of(a, world)
    default_trainers, default_rollouts = (TRAINERS[:2], ROLLOUTS[:1]) if a.quick else (TRAINERS, ROLLOUTS)
    further = [TrainerLayout.parse(text) for text in a.trainers or default_trainers]
    rollouts = [RolloutLayout.parse(text) for text in a.rollouts or default_rollouts]
    new_tokens = a.max_new_tokens if a.max_new_tokens is not None else (16 if a.quick else 32)
    check_shared(a, {"--rounds": (a.rounds, 1), "--max-new-tokens": (new_tokens, 1)}, " (half of the requests are greedy anyway)")
    if a.prompts is not None and not a.prompts.is_file():
        raise ValueError(f"--prompts {a.prompts}: no such file")
    return Options(
        trainer=trainer,
        trainers=tuple({str(each): each for each in (trainer, *further)}.values()),
        rollouts=tuple(dict.fromkeys(rollouts)),
        prompts=a.prompts,
        rounds=a.rounds,
        max_new_tokens=new_tokens,
        pretrain_steps=min(a.pretrain_steps, 30) if a.quick else a.pretrain_steps,
        pretrain_seconds=25.0 if a.quick else 600.0,
        train=not a.no_train,
        control=not a.no_control,
        quick=a.quick,
        out=a.out,
        **shared_values(a, a.checkpoint or "tiny"),  # type: ignore[arg-type]
    )

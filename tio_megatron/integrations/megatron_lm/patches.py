"""Patches of Megatron-LM's ``megatron.training``: its arguments, its tokenizer's vocabulary, the models it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tio_megatron.findings.finding import dry_run, verdict
from tio_megatron.integrations import releases
from tio_megatron.integrations.megatron_lm import yaml_files
from tio_megatron.integrations.megatron_lm.defaults import implied, imply, of_optimizer, refuse
from tio_megatron.integrations.megatron_lm.options import add_options
from tio_megatron.integrations.patching import Patch

TRAINING = "megatron.training"


def training_patches() -> list[Patch]:
    """All of them; they wait until the script imports ``megatron.training``."""
    return [
        _patch("arguments:add_megatron_arguments", with_options, "parse_args reads this name, whoever has imported parse_args", "every argument of its own"),
        _patch("initialize:validate_args", checked, "the first place that sees all arguments, where initialize_megatron reads it", "every check of its own"),
        _patch("yaml_arguments:load_yaml", yaml_files.as_arguments, "parse_args calls it for --yaml-cfg, and its own checks cannot be met", "how YAML is read"),
        _patch("global_vars:_build_tokenizer", noting_vocabulary, "the tokenizer knows the true vocabulary; the model sees it padded, by the layout"),
        _patch("training:get_model", only_ours, "the one place where a script's model comes out, whatever class it is"),
    ]


def stock_patches() -> list[Patch]:
    """For a run without a contract whose command line has ``--tio-*`` arguments (a stock control): they are taken, and change nothing else."""
    return [_patch("arguments:add_megatron_arguments", with_options_alone, "parse_args reads this name", "everything else")]


def _patch(target: str, build: Callable[[Any], Any], why: str, stock: str = "") -> Patch:
    return Patch(f"{TRAINING}.{target}", build, why=why, stock=stock, supported=releases.described("Megatron-LM"))


def with_options(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``add_megatron_arguments``: ours beside its own, and the defaults that the contract asks for."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = original(parser)
        imply(parser)
        yaml_files.remember(parser)
        return add_options(parser)

    return add_megatron_arguments


def with_options_alone(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``add_megatron_arguments``: ours beside its own."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_options(original(parser))

    return add_megatron_arguments


def checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """``validate_args``: refuse by name on every rank, then say on rank 0 what is in force."""

    @functools.wraps(original)
    def validate(args: Any, *more: Any, **named: Any) -> Any:
        refuse(args)
        args = original(args, *more, **named)
        if dry_run() and (found := of_optimizer(args)):  # of the rest the model's build says the verdict
            verdict("this run cannot obey the contract with these options", found)
        if args.rank == 0:
            for line in _announcement(args):
                print(f"tio_megatron: {line}", flush=True)
        return args

    return validate


def _announcement(args: Any) -> list[str]:
    from tio_megatron import kernels
    from tio_megatron.integrations.megatron.applied import state

    contract = state.active()
    lines = [f"contract {contract.fingerprint(kernels.version(contract.family))} is in force", f"implied: {' '.join(implied(args))}"]
    if getattr(args, "load", None) is None and getattr(args, "pretrained_checkpoint", None) is None:
        if not args.use_cpu_initialization:
            lines.append("random weights depend on the layout; --use-cpu-initialization draws the same for every TP, EP and DP, a checkpoint (--load) for all")
        elif args.pipeline_model_parallel_size > 1:
            lines.append("random weights depend on the pipeline stages; a checkpoint (--load) starts every layout from the same")
    return lines


def noting_vocabulary(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``_build_tokenizer``: the true vocabulary is the tokenizer's, unless it was given."""

    @functools.wraps(original)
    def _build_tokenizer(args: Any) -> Any:
        from tio_megatron.integrations.megatron.applied import state

        tokenizer = original(args)
        session = state.session()
        if session is not None and session.vocab_size is None:
            state.learn_vocab_size(int(tokenizer.vocab_size))
            if args.rank == 0:
                print(
                    f"tio_megatron: {int(tokenizer.vocab_size)} rows of the vocabulary count, as the tokenizer says; --tio-vocab-size says another number "
                    "(that of the config.json which the rollout reads)",
                    flush=True,
                )
        return tokenizer

    return _build_tokenizer


def only_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """``get_model``: refuse a model whose layers are not ours (Mamba, T5, BERT, vision), which would run with stock's sums."""

    @functools.wraps(original)
    def get_model(*args: Any, **named: Any) -> Any:
        model = original(*args, **named)
        for chunk in model:
            while not hasattr(chunk, "tio_setting") and hasattr(chunk, "module"):
                chunk = chunk.module
            if not hasattr(chunk, "tio_setting"):
                raise ValueError(
                    f"{type(chunk).__name__} has no ordered form, and its sums would be stock's; megatron-core's GPTModel (pretrain_gpt.py) would work"
                )
        return model

    return get_model

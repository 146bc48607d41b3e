"""The ``--tio-*`` arguments: what a command line says about the contract. Reads text; applies nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

OFF = ("0", "off")
"""Values of ``--tio-contract`` that leave the packages stock."""


@dataclass(frozen=True)
class Options:
    """What was said; ``None`` where nothing was.

    ``contract``: as the variable ``TIO_CONTRACT`` reads it, or one of :data:`OFF`. ``vocab_size``: true vocabulary. ``device``: ``"cpu"``.
    """

    contract: str | None = None
    vocab_size: int | None = None
    device: str | None = None


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments to a script's own parser, so that it takes them and its ``--help`` lists them."""
    group = parser.add_argument_group(
        title="tio_megatron", description="One order for every sum. All are read before the model is built, from the command line alone."
    )
    group.add_argument(
        "--tio-contract", metavar="WHICH", help="1 or default; a JSON object or the path of a JSON file with a contract's fields; 0: stock (else: TIO_CONTRACT)"
    )
    group.add_argument(
        "--tio-vocab-size", type=_positive, metavar="N", help="true vocabulary (else: the tokenizer's): vocab_size of the config.json that the rollout reads"
    )
    group.add_argument("--tio-device", choices=["cpu"], help="cpu: run on a machine without GPU (with --distributed-backend gloo)")
    return parser


def read_options(arguments: Sequence[str]) -> Options:
    """The ``--tio-*`` among a script's arguments; all others are left to the script.

    Raises:
        SystemExit: a value that cannot be, named on the standard error output (status 2), as by the script's own parser.

    >>> read_options(["--num-layers", "4", "--tio-vocab-size", "1000", "--tio-contract=0"])
    Options(contract='0', vocab_size=1000, device=None)
    """
    parser = add_options(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    found, _ = parser.parse_known_args(list(arguments))
    return Options(found.tio_contract, found.tio_vocab_size, found.tio_device)


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value

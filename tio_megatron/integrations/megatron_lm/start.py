"""Switches the contract on before a script runs: from the environment and the command line, for ``tio_megatron.auto`` and ``.run``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tio_megatron.contract.environment import VARIABLE as CONTRACT
from tio_megatron.contract.environment import Setting, from_environment, read
from tio_megatron.findings.finding import dry_run, unjudged
from tio_megatron.integrations.megatron_lm.options import OFF, Options, read_options
from tio_megatron.integrations.megatron_lm.patches import stock_patches
from tio_megatron.integrations.patching import PatchSet

VARIABLE = "TIO_MEGATRON"
"""``1``: ``tio_megatron.auto`` applies a contract, the default one where ``TIO_CONTRACT`` names none. Unset, empty or ``0``: it follows ``TIO_CONTRACT``."""


_stock = PatchSet(stock_patches, on_import=True)
"""What lets a stock run's parser take our arguments."""


def chosen(options: Options, *, wanted: bool = False, environ: Mapping[str, str] | None = None) -> Setting | None:
    """The setting that command line and environment name together, or ``None`` for stock.

    The command line goes before ``TIO_CONTRACT``; where neither says anything, ``wanted`` or ``TIO_MEGATRON=1`` asks for the default contract.

    Raises:
        ValueError: a variable or an argument names nothing that can be read, or the vocabulary is given twice.

    >>> chosen(Options(), environ={}) is None, chosen(Options(contract="0"), environ={"TIO_CONTRACT": "1"}) is None
    (True, True)
    >>> chosen(Options(vocab_size=1000), environ={"TIO_MEGATRON": "1"}).vocab_size
    1000
    """
    environ = os.environ if environ is None else environ
    switch = environ.get(VARIABLE, "").strip()
    if switch not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={switch!r}: 1 switches tio_megatron on, 0 (or nothing) leaves it to {CONTRACT}")
    if options.contract is not None:
        if options.contract.strip() in OFF:
            return None
        try:
            setting: Setting | None = read(options.contract)
        except ValueError as error:
            raise ValueError(f"--tio-contract {options.contract}: {error}") from error
    elif environ.get(CONTRACT, "").strip() == "0":
        return None
    else:
        setting = from_environment(environ)
        if setting is None and (wanted or switch == "1"):
            setting = read("default")
    if setting is None or options.vocab_size is None or options.vocab_size == setting.vocab_size:
        return setting
    if setting.vocab_size is not None:
        raise ValueError(f"the true vocabulary is given twice: {setting.vocab_size} in the contract, --tio-vocab-size {options.vocab_size}")
    return Setting(setting.contract, options.vocab_size)


def switch_on(arguments: Sequence[str], *, wanted: bool = False) -> Setting | None:
    """Apply what ``arguments`` and the environment name to this process; on a CPU if asked, under the contract or not.

    Args:
        arguments: of the script.
        wanted: apply the default contract where nothing names one.

    Returns:
        What was applied, or ``None``.

    Raises:
        ValueError, ImportError, RuntimeError: see :func:`chosen`, :func:`tio_megatron.apply` and :func:`.cpu_device.enable`.
    """
    options = read_options(arguments)
    leave()
    setting = chosen(options, wanted=wanted)
    if options.device == "cpu":
        from tio_megatron.integrations.megatron_lm import cpu_device

        # Before the contract: its patches lie on top.
        cpu_device.enable()
    if setting is not None:
        from tio_megatron.integrations.megatron.applied.apply import apply

        apply(setting.contract, vocab_size=setting.vocab_size)
    elif dry_run():
        unjudged(f"{CONTRACT} names no contract")
    elif options != Options():
        _stock.on()
    return setting


def leave() -> None:
    """Take back what :func:`switch_on` did to a stock run's parser. Harmless when it did nothing."""
    _stock.undo()

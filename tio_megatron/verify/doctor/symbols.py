"""Which of our patches are in force in this process, and whose code stands where ours would."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence

from tio_megatron.findings.finding import Finding
from tio_megatron.integrations.patching import MovedSymbolError, author_of

TOPIC = "patches"


def check(modules: Sequence[str] = ()) -> Iterator[Finding]:
    """Import ``modules`` (what the run imports first: ``tio_megatron.auto``, ``mindspeed.megatron_adaptor``), then look at every symbol.

    Args:
        modules: dotted names, in the run's order. They run in this process, as they would in the run's.

    Raises:
        ValueError: a module that cannot be imported.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"module {name}: cannot be imported ({error})") from error
    if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None:
        from tio_megatron.integrations.megatron.applied import state

        session = state.session()
        yield from _unapplied() if session is None else _applied(session.contract.fingerprint())
    else:
        yield Finding("megatron-core is not installed: its symbols were not looked at", level="note", topic=TOPIC)
    if importlib.util.find_spec("vllm") is not None:
        yield from _entry_point()


def _applied(fingerprint: str) -> Iterator[Finding]:
    """Whether every symbol still holds what was put there, by the account of who put it."""
    from tio_megatron.integrations.megatron.applied.state import patched, problems

    how, lost = patched(), problems()
    for line in lost:
        yield Finding(line, "apply tio_megatron last, or through the other's patch manager where it has one", topic=TOPIC)
    for symbol, others in how["shared"].items():
        yield Finding(f"{symbol} is shared with {others}", "", level="note", topic=TOPIC)
    if not lost:
        yield Finding(f"megatron-core: {len(how['symbols'])} symbols are ours, through {how['through']}; contract {fingerprint}", level="ok", topic=TOPIC)


def _unapplied() -> Iterator[Finding]:
    """Whether every symbol that would be patched is there and still stock's."""
    from tio_megatron.integrations.megatron.applied.patches import all_patches

    patches = all_patches()
    for patch in patches:
        try:
            owner, name = patch.owner()
        except MovedSymbolError as error:
            yield Finding(str(error), f"install {patch.supported}", topic=TOPIC)
            continue
        if name not in vars(owner):
            if not patch.may_be_absent:
                yield Finding(f"{patch.target} is not there", f"install {patch.supported}", topic=TOPIC)
            continue
        author = author_of(vars(owner)[name])
        if author not in ("megatron", "torch", ""):
            yield Finding(
                f"{patch.target} is {author}'s, patched before tio_megatron",
                f"apply tio_megatron after {author}, or through its patch manager where it has one",
                level="note",
                topic=TOPIC,
            )
    works = "tio doctor --import tio_megatron.auto with TIO_CONTRACT set looks at a process that applies one"
    yield Finding(f"megatron-core: no contract is applied in this process ({len(patches)} symbols would be patched)", works, level="note", topic=TOPIC)


def _entry_point() -> Iterator[Finding]:
    """vLLM loads plug-ins by entry point, if ``VLLM_PLUGINS`` lets it."""
    import os
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "tio_megatron"]
    if not found:
        yield Finding(
            "vLLM has no entry point tio_megatron: its processes would not load the plug-in",
            "install the package (pip install, or make setup), not only its path",
            topic=TOPIC,
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "tio_megatron" not in allowed.split(","):
        yield Finding(f"VLLM_PLUGINS={allowed!r} leaves tio_megatron out", "add tio_megatron to VLLM_PLUGINS, or unset it", topic=TOPIC)
        return
    yield Finding(
        "vLLM loads the plug-in in every process"
        + ("" if os.environ.get("TIO_CONTRACT") else "; it stays off until TIO_CONTRACT is set or engine_options() is used"),
        level="ok",
        topic=TOPIC,
    )

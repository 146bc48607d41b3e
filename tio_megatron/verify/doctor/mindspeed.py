"""MindSpeed's options among a trainer's, by the table by which a model is refused under MindSpeed (:mod:`tio_megatron.integrations.mindspeed.options`)."""

from __future__ import annotations

from collections.abc import Iterator

from tio_megatron.integrations.mindspeed.context import refusal
from tio_megatron.integrations.mindspeed.options import NAMES
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.options import TOPIC
from tio_megatron.verify.doctor.running import Running

ALGORITHM = "context_parallel_algo"


def trainer(run: Running) -> Iterator[Finding]:
    """One ``bad`` for each that a contract refuses.

    Args:
        run: as it will run; verl's overrides count as written.
    """
    overridden = run.get("override_transformer_config", ()) if run.kind == "verl" else ()
    for name in sorted({*run.written, *overridden}):
        option = NAMES.get(name)
        if option is None or option.asked:  # Megatron-LM's own
            continue
        line = option.broken_by(run)
        if name == ALGORITHM and run.get("context_parallel_size", 1) not in (None, 1):
            line = refusal(run[name])
        if line is not None:
            what, _, works = line.rpartition("; ")
            yield Finding("bad", TOPIC, f"trainer: {what}", works)

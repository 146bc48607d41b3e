"""Whether the plug-in is in force in every worker of an engine: asked when a worker loads its model, and whenever the engine's owner wants to know."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tio_megatron import kernels
from tio_megatron.findings.finding import refuse
from tio_megatron.integrations import handshake, handshake_files
from tio_megatron.integrations.vllm import in_force

METHOD = "tio_process"
WORKER = "vllm.v1.worker.worker_base:WorkerBase"
SECONDS = 120.0


def this_worker() -> dict[str, Any]:
    """What this process runs: pid, host, versions, contract, symbols that are patched, and problems. See :func:`.handshake.record`."""
    contract, installed = in_force.active(), in_force.patches()
    version = kernels.version(contract.family)
    return handshake.record(
        "vllm",
        contract=contract.fingerprint(version),
        kernels=version,
        symbols=installed.targets,
        problems=[
            f"{line}; take the other plug-in out (VLLM_PLUGINS names those to load), or let it patch before tio_megatron" for line in installed.problems()
        ]
        + trainer_without_us(),
        shared=installed.shared(),
    )


def trainer_without_us() -> list[str]:
    """One line where this is a rollout of verl whose trainer is stock.

    verl gives one environment to all its workers, and each of them, this one too, imports what ``VERL_USE_EXTERNAL_MODULES`` names. vLLM finds its
    plug-in without that; Megatron does not.
    """
    if "verl" not in sys.modules or "tio_megatron.auto" in sys.modules:
        return []
    named = os.environ.get("VERL_USE_EXTERNAL_MODULES", "")
    return [
        f"TIO_CONTRACT is set and verl runs here, but tio_megatron.auto was not imported (VERL_USE_EXTERNAL_MODULES={named!r}): verl's trainer would be stock; "
        "VERL_USE_EXTERNAL_MODULES=tio_megatron.auto in the environment of every worker (Ray: in runtime_env) would work, or no TIO_CONTRACT for a stock run"
    ]


def tio_process(worker: Any) -> dict[str, Any]:
    """The method that ``collective_rpc`` finds on a worker: :func:`this_worker`, and ``model``, the class of the model that is loaded."""
    mine = this_worker() | {"model": type(worker.model_runner.get_model()).__name__}
    handshake_files.leave(mine, _ranks())
    return mine


BETWEEN = ("contract", "kernels", "tio_megatron")
"""What a trainer and its rollout must have in common."""


def tio_agree(worker: Any, theirs: Mapping[str, Any]) -> None:
    """The method by which a trainer asks whether this worker obeys its contract, where ``collective_rpc`` brings no answer back (verl's servers).

    Args:
        worker: of the rollout, which stands for its process.
        theirs: :func:`.handshake.record` of the trainer.

    Raises:
        ValueError: it does not; names what differs.
    """
    ours = this_worker()
    found = [f"{field}: {ours[field]} / {theirs.get(field)}" for field in BETWEEN if ours[field] != theirs.get(field)]
    if found:
        raise ValueError(
            f"rollout and trainer obey different contracts (rollout {handshake.who(ours)} / trainer {handshake.who(theirs)}): {'; '.join(found)}; give both "
            "the same packages and TIO_CONTRACT"
        )


METHODS = (tio_process, tio_agree)
"""Given to every worker, for ``collective_rpc``."""


def all_workers(llm: Any, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """Every worker of a running engine, asked through ``LLM.collective_rpc``.

    Args:
        llm: a ``vllm.LLM``, or anything with its ``collective_rpc``.
        seconds: to wait for the slowest.

    Returns:
        What :func:`tio_process` says in each, in the order of ranks.

    Raises:
        ValueError: the plug-in is off in a worker, or workers differ; names them.
    """
    try:
        found: list[dict[str, Any]] = list(llm.collective_rpc(METHOD, timeout=seconds))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        if METHOD not in str(error):
            raise
        raise ValueError(
            "tio_megatron did not load in the workers of this engine: set TIO_CONTRACT in their environment (and leave tio_megatron in VLLM_PLUGINS, if that "
            "is set), or start the engine with tio_megatron.integrations.vllm.engine_options(...)"
        ) from error
    refuse("tio_megatron is not in force in every worker", handshake.differences(found))
    return found


def load_together(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``BaseModelLoader.load_model``: all workers of the engine are there, with the same plug-in in force; and the model that comes out is ours."""

    @functools.wraps(stock)
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if in_force.is_active():
            handshake.meet(this_worker(), _ranks())
        model = stock(self, vllm_config, model_config, *args, **kwargs)
        if in_force.is_active() and not hasattr(model, "ledger"):
            raise ValueError(_another(type(model)))
        return model

    return load_model


def _another(model: type) -> str:
    package = model.__module__.partition(".")[0]
    plugins = sorted(point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins") if point.name != "tio_megatron")
    others = f"; plug-ins beside tio_megatron here: {', '.join(plugins)}" if plugins else ""
    return (
        f"vLLM built {model.__module__}.{model.__name__} in this worker, not tio_megatron's model: {package} registered the architecture after tio_megatron"
        f"{others}. Take it out (VLLM_PLUGINS names those to load), or leave TIO_CONTRACT unset for its models"
    )


def _ranks() -> list[int]:
    state = sys.modules.get("vllm.distributed.parallel_state")
    world = getattr(state, "_WORLD", None)
    return [0] if world is None else list(world.ranks)

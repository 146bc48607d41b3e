"""Starting an engine by argument instead of by environment variable."""

from __future__ import annotations

import importlib.util
from typing import Any

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import read
from tio_megatron.findings.messages import shown
from tio_megatron.integrations.vllm import platforms
from tio_megatron.integrations.vllm.ascend import seam

SCHEDULER = "tio_megatron.integrations.vllm.scheduler.TioScheduler"


_OURS = dict.fromkeys(("worker_cls", "scheduler_cls", "weight_transfer_config"), "is the plug-in's own; leave it out")
_OURS |= {"tensor_parallel_size": "is named by tp", "enable_expert_parallel": "is named by expert_parallel"}
"""Arguments of vLLM that would switch a part of the plug-in off."""


def engine_options(contract: Contract | dict[str, Any] | str | None = None, *, tp: int = 1, expert_parallel: bool = False, **others: Any) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` (or ``AsyncEngineArgs``) that put ``contract`` in force in that engine.

    The same by hand: ``worker_cls="tio_megatron.integrations.vllm.worker.TioWorker"``,
    ``additional_config={"tio_contract": ...}``, ``weight_transfer_config={"backend": "tio"}`` and
    ``scheduler_cls="tio_megatron.integrations.vllm.scheduler.TioScheduler"``. Where vLLM is installed, this process's front end is patched too, so
    that it says in one line what is not covered (:mod:`.front`).

    Args:
        contract: anything that :func:`tio_megatron.contract.environment.read` takes; the default contract by default.
        tp: tensor-parallel ranks.
        expert_parallel: deal whole experts out to the ranks instead of cutting each.
        others: passed on; ``additional_config`` is added to.

    Raises:
        ValueError: ``tp`` is no whole number of at least 1 or does not divide the contract's leaves; another option is not what it must be or is not the
            caller's; or the contract cannot be read.

    >>> engine_options(tp=2, max_model_len=512)["tensor_parallel_size"]
    2
    """
    if type(tp) is not int or tp < 1:
        raise ValueError(f"engine_options: tp is {tp!r}; expected a whole number of ranks, at least 1")
    if type(expert_parallel) is not bool:
        raise ValueError(f"engine_options: expert_parallel is {expert_parallel!r}; expected True or False")
    if ours := sorted(others.keys() & _OURS.keys()):
        raise ValueError("engine_options: " + "; ".join(f"{name} {_OURS[name]}" for name in ours))
    given = others.pop("additional_config", {})
    if not isinstance(given, dict):
        raise ValueError(f"engine_options: additional_config is {given!r}; expected a dictionary")
    order = read(contract).contract
    if wrong := [f"cuts.{axis} = {leaves}" for axis in ("attn_row", "vocab") if (leaves := getattr(order.cuts, axis)) % tp]:
        works = [size for size in range(1, order.cuts.vocab + 1) if order.cuts.attn_row % size == 0 == order.cuts.vocab % size]
        raise ValueError(f"engine_options: tp is {shown(tp)}, which does not divide the contract's {' and '.join(wrong)}; tp in {works} would work")
    additional = {**given, "tio_contract": order.to_dict()}
    options: dict[str, Any] = {
        "worker_cls": platforms.worker(),
        "scheduler_cls": SCHEDULER,
        "additional_config": additional,
        "weight_transfer_config": {"backend": "tio"},
        "tensor_parallel_size": tp,
        "enable_expert_parallel": expert_parallel,
        "enforce_eager": True,
    }
    if platforms.worker() == platforms.ASCEND_WORKER:
        options = {name: value for name, value in (options | seam.ENGINE_OPTIONS).items() if value is not None}
        options["additional_config"] = seam.ADDITIONAL | additional
    if tp > 1:
        options["distributed_executor_backend"] = "mp"
    if importlib.util.find_spec("vllm") is not None:
        from tio_megatron.integrations.vllm import front

        front.patches.on()
    return options | others

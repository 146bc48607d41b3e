"""What a worker answers beside vLLM's own methods, through ``LLM.collective_rpc``. Names no platform.

With ``TIO_CONTRACT`` set, give ``worker_extension_cls="tio_megatron.integrations.vllm.extension.WorkerExtension"``; without it,
:func:`.options.engine_options` names the worker class of the platform, which holds the same methods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tio_megatron import kernels
from tio_megatron.checkpoint import tensor_digest
from tio_megatron.contract.environment import read
from tio_megatron.integrations import releases
from tio_megatron.integrations.vllm import in_force, plugin, refusals
from tio_megatron.integrations.vllm.front import ARGUMENT
from tio_megatron.integrations.vllm.names import whole_tensors
from tio_megatron.integrations.vllm.sampler import RowRecorder


class WorkerExtension:
    """Methods for ``collective_rpc``; each returns one value per rank, and the first rank's holds the answer."""

    def tio_contract(self) -> dict[str, Any]:
        """What this engine obeys: ``contract``, ``kernels``, ``fingerprint``, ``layout``, ``model`` and ``versions``; or why it obeys none, ``off``."""
        model, off = self.model_runner.get_model(), _why_off(self)  # type: ignore[attr-defined]
        if off:
            return {"off": off}
        contract = in_force.active()
        return {
            "contract": contract.to_dict(),
            "kernels": kernels.version(contract.family),
            "fingerprint": contract.fingerprint(kernels.version(contract.family)),
            "layout": str(refusals.layout_of(self.vllm_config)),  # type: ignore[attr-defined]
            "model": vars(model.shape) | {"dtype": str(self.model_config.dtype).removeprefix("torch.")},  # type: ignore[attr-defined]
            "versions": {name: releases.installed(name) for name in ("vllm", "torch")},
        }

    def tio_layers(self) -> dict[str, int]:
        """How many layers of each class the model has, attention implementations included."""
        model = _model(self)
        names = [type(module).__name__ for module in model.modules()]
        names += [type(module.impl).__name__ for module in model.modules() if hasattr(module, "impl")]
        return dict(Counter(names))

    def tio_memory(self) -> dict[str, int]:
        """Bytes of weights on this rank: ``packed``, ``raw`` beside them (0 between loads) and ``other`` (embedding, norms)."""
        model = _model(self)
        report = model.ledger.report()
        return report | {"other": sum(param.nbytes for param in model.parameters()) - report["raw"]}

    def tio_digests(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """HF name -> digest of the whole tensor, gathered over all ranks; on the first rank, empty on the others."""
        return gathered_digests(_model(self), names)

    def tio_load(self, path: str) -> int:
        """Load every tensor of a safetensors file by vLLM's own ``load_weights``; returns how many. The prefix cache is reset by the engine."""
        from safetensors import safe_open
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), safe_open(str(Path(path)), "pt") as file:  # type: ignore[attr-defined]
            _model(self).load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            return len(file.keys())

    def tio_update_problems(self) -> list[str]:
        """Tensors of the running weight update whose bytes are not the trainer's, ``name: rollout / trainer``."""
        return list(self.weight_transfer_engine.problems)  # type: ignore[attr-defined]

    def tio_abort_update(self) -> None:
        """Give up a weight update, so that another may start. Once something was loaded, requests are refused until everything has come again."""
        self._weight_update_active = False
        _model(self).ledger.abort()

    def tio_record(self, on: bool = True, prompts: bool = False) -> None:
        """Start or stop recording digests of whole rows of log-probabilities (see :class:`.sampler.RowRecorder`)."""
        _model(self)
        recorder = self.__dict__.pop("_tio_recorder", None)
        if recorder is not None:
            recorder.stop()
        if on:
            self.__dict__["_tio_recorder"] = RowRecorder(self.model_runner, prompts)  # type: ignore[attr-defined]

    def tio_rows(self) -> list[tuple[str, int, int, bytes]]:
        """(request, position, token, digest of the row) of every row since the last call.

        Raises:
            ValueError: nothing is being recorded.
        """
        recorder = self.__dict__.get("_tio_recorder")
        if recorder is None:
            raise ValueError("tio_rows: call tio_record first")
        rows, recorder.rows = recorder.rows, []
        return rows


def switch_on(worker: type, vllm_config: Any) -> None:
    """Put the contract of ``additional_config["tio_contract"]`` in force, before a worker of class ``worker`` is built.

    Raises:
        ValueError: there is none, and none is in force.
    """
    given = (vllm_config.additional_config or {}).get(ARGUMENT)
    if given is None and not in_force.is_active():
        raise ValueError(f"{worker.__name__} needs additional_config={{{ARGUMENT!r}: ...}}: a contract, 'default', JSON or a path")
    if given is not None:
        plugin.activate(read(given).contract)


def gathered_digests(model: Any, names: Sequence[str] | None = None) -> dict[str, str]:
    """HF name -> digest of the whole tensor; on the first rank of the group, empty on the others. Called by all of them."""
    from vllm.distributed import get_tp_group

    found: dict[str, str] = {}
    for name, tensor in whole_tensors(model, None if names is None else set(names)):
        if tensor is not None:
            found.setdefault(name, tensor_digest(tensor))
    group = get_tp_group()
    if group.world_size == 1:
        return found
    parts: list[Any] | None = [None] * group.world_size if group.rank_in_group == 0 else None
    torch.distributed.gather_object(found, parts, dst=group.ranks[0], group=group.cpu_group)
    if parts is None:
        return {}
    return {name: digest for part in parts for name, digest in part.items()}


def from_first_rank(value: Any) -> Any:
    """``value`` of the group's first rank, on every rank."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)
    return box[0]


def _why_off(worker: Any) -> str | None:
    model = worker.model_runner.get_model()
    if in_force.is_active() and hasattr(model, "ledger"):
        return None
    return (
        f"the rollout engine runs stock {type(model).__name__}: tio_megatron is off in it. Start it with TIO_CONTRACT set, or with "
        "tio_megatron.integrations.vllm.engine_options(...)"
    )


def _model(worker: Any) -> Any:
    off = _why_off(worker)
    if off:
        raise ValueError(off)
    return worker.model_runner.get_model()

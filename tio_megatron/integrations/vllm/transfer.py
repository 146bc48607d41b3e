"""Our weight transfer engine for vLLM (``weight_transfer_config={"backend": "tio"}``): the worker's side; :mod:`.trainer_side` is the other.

init exchanges contracts and refuses a difference; start stops the model; update loads one safetensors file of whole HF tensors, any subset
of names, and compares the digests of what the engine then holds with those that the trainer sent; finish lets the model run again.

What a trainer can mend (other bytes) is no exception: it is kept, ``tio_update_problems`` tells it, and finish refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from tio_megatron import kernels
from tio_megatron.checkpoint import digest_differences
from tio_megatron.contract.environment import read
from tio_megatron.integrations.vllm import in_force
from tio_megatron.integrations.vllm.extension import from_first_rank, gathered_digests


@dataclass
class TioInitInfo(WeightTransferInitInfo):
    """The trainer's contract (its fields) and the version of its kernels."""

    contract: dict[str, Any]
    kernels: str


@dataclass
class TioUpdateInfo(WeightTransferUpdateInfo):
    """One safetensors file, and the digests of the whole tensors in it (empty: not verified)."""

    path: str
    digests: dict[str, str] = field(default_factory=dict)


def contract_differences(theirs: dict[str, Any], their_kernels: str) -> list[str]:
    """``field: rollout / trainer`` for each difference; empty when the two sides agree.

    Raises:
        ValueError: their contract is none.
    """
    ours = in_force.active()
    found = ours.differences(read(theirs).contract)
    if their_kernels != kernels.version(ours.family):
        found.append(f"kernels: {kernels.version(ours.family)} / {their_kernels}")
    return found


class TioTransferEngine(WeightTransferEngine[TioInitInfo, TioUpdateInfo]):
    """Loads by vLLM's own loaders, into our packed weights."""

    init_info_cls = TioInitInfo
    update_info_cls = TioUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self.model, "ledger"):
            raise ValueError(f"weight transfer 'tio' needs a model of tio_megatron, not stock {type(self.model).__name__}: set TIO_CONTRACT")
        self._agreed = False
        self.problems: list[str] = []

    def init_transfer_engine(self, init_info: TioInitInfo) -> None:
        """Agree on the contract.

        Raises:
            ValueError: a difference, with the fields named.
        """
        found = contract_differences(init_info.contract, init_info.kernels)
        self._agreed = not found
        if found:
            raise ValueError(f"rollout and trainer obey different contracts (rollout / trainer): {'; '.join(found)}")

    def start_weight_update(self) -> None:
        """Begin an update.

        Raises:
            ValueError: contracts were not exchanged.
        """
        if not self._agreed:
            raise ValueError("weight update: exchange contracts first (init_weight_transfer_engine)")
        self.problems = []
        self.model.ledger.begin()

    def receive_weights(self, update_info: TioUpdateInfo) -> None:
        """Load one file and compare digests.

        Raises:
            ValueError: the file is missing, or a tensor is none of the model's.
        """
        from safetensors import safe_open

        path = Path(update_info.path)
        if not path.is_file():
            raise ValueError(f"weight update: {path} is no file on the rollout's machine")
        with safe_open(str(path), "pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        if update_info.digests:
            held = gathered_digests(self.model, list(update_info.digests))
            self.problems += from_first_rank(digest_differences(held, update_info.digests) if held else None)

    def finish_weight_update(self) -> None:
        """Let the model run again.

        Raises:
            ValueError: tensors whose bytes are not the trainer's, by name. The model stays stopped.
        """
        if self.problems:
            raise ValueError("weight update: digests differ (rollout / trainer):\n  " + "\n  ".join(self.problems[:20]))
        self.model.ledger.updating = None

    def shutdown(self) -> None:
        """Nothing is held."""

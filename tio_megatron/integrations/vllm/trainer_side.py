"""What a trainer calls on a running engine: exchange contracts, push weights. Imports neither vLLM nor Megatron."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tio_megatron import kernels
from tio_megatron.checkpoint import TensorSpec, tensor_digest, tensor_table
from tio_megatron.contract import Contract, ModelShape

BUCKET = 256 << 20
"""Bytes of one file of weights."""

_SHARED_MEMORY = Path("/dev/shm")


class Engine(Protocol):
    """vLLM's ``LLM``, or anything with its ``collective_rpc``."""

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Sequence[Any]:
        """Call a worker method on every rank."""


def rollout_contract(engine: Engine) -> dict[str, Any]:
    """What the engine obeys: the answer of :meth:`.worker.WorkerExtension.tio_contract`.

    Raises:
        ValueError: tio_megatron is off in the engine, or its worker does not answer.
    """
    try:
        answer = dict(engine.collective_rpc("tio_contract")[0])
    except Exception as error:
        # In process vLLM says that the method is not implemented, from another process that the worker has no such attribute.
        if "not implemented" in str(error) or "no attribute 'tio_contract'" in str(error):
            raise ValueError(_NO_ANSWER) from error
        raise
    if "off" in answer:
        raise ValueError(answer["off"])
    return answer


_NO_ANSWER = (
    "the rollout engine does not answer tio_contract: tio_megatron is on in the trainer only. Start the engine with "
    "tio_megatron.integrations.vllm.engine_options(...), or with TIO_CONTRACT set and "
    "worker_extension_cls='tio_megatron.integrations.vllm.worker.WorkerExtension'"
)


def check_rollout(engine: Engine, contract: Contract) -> dict[str, Any]:
    """Refuse an engine that obeys another contract than the trainer's; returns what it answered.

    Raises:
        ValueError: a difference, with the fields named, or no answer.
    """
    answer = rollout_contract(engine)
    found = contract.differences(Contract.from_json(json.dumps(answer["contract"])))
    if answer["kernels"] != kernels.version(contract.family):
        found.append(f"kernels: {kernels.version(contract.family)} / {answer['kernels']}")
    if found:
        raise ValueError(f"trainer and rollout obey different contracts (trainer / rollout): {'; '.join(found)}")
    return answer


def push_weights(
    engine: Engine,
    tensors: Iterable[tuple[str, torch.Tensor]],
    contract: Contract,
    *,
    folder: Path | None = None,
    bucket_bytes: int = BUCKET,
    verify: bool = True,
    partial: bool = False,
) -> dict[str, str]:
    """Move whole HF tensors into a running engine; returns the digests of what was sent (empty without ``verify``).

    The engine is one started with ``weight_transfer_config={"backend": "tio"}`` (:func:`.options.engine_options` does). The tensors
    come in any order. Afterwards the engine has compared the digests of what it holds, and its prefix cache is empty.

    Args:
        folder: where files are handed over, readable by the engine; shared memory by default.
        bucket_bytes: bytes of one file.
        verify: compare digests (one pass of SHA-256 over the weights on each side).
        partial: some of the model's tensors are enough; the engine keeps the others as they are.

    Raises:
        ValueError: the contracts differ, a tensor is none of the model's or (without ``partial``) missing, or the engine ends up with other bytes.
    """
    answer = check_rollout(engine, contract)
    table, dtype = tensor_table(_shape(answer["model"])), answer["model"]["dtype"]
    sent: dict[str, str] = {}
    missing = dict.fromkeys(table)
    _call(engine, "init_weight_transfer_engine", init_info={"contract": contract.to_dict(), "kernels": kernels.version(contract.family)})
    _call(engine, "start_weight_update")
    root = Path(tempfile.mkdtemp(prefix="tio-weights-", dir=folder or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)))
    try:
        for number, bucket in enumerate(_buckets(_checked(tensors, table, dtype), bucket_bytes)):
            path = root / f"{number}.safetensors"
            for name in bucket:
                missing.pop(name, None)
            digests = {name: tensor_digest(tensor) for name, tensor in bucket.items()} if verify else {}
            _save(bucket, path)
            _call(engine, "update_weights", update_info={"path": str(path), "digests": digests})
            path.unlink()
            found = engine.collective_rpc("tio_update_problems")[0]
            if found:
                raise ValueError("push_weights: digests differ (rollout / trainer):\n  " + "\n  ".join(found[:20]))
            sent |= digests
    except BaseException:
        engine.collective_rpc("tio_abort_update")
        raise
    finally:
        shutil.rmtree(root, ignore_errors=True)
    _call(engine, "finish_weight_update")
    if missing and not partial:
        named = ", ".join([*missing][:5])
        raise ValueError(f"push_weights: {len(missing)} of {len(table)} tensors did not come and are as they were: {named}, ...; push all, or say partial=True")
    return sent


def _shape(fields: dict[str, Any]) -> ModelShape:
    return ModelShape(**{field.name: fields[field.name] for field in dataclasses.fields(ModelShape)})


def _checked(tensors: Iterable[tuple[str, torch.Tensor]], table: dict[str, TensorSpec], dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        if name not in table:
            raise ValueError(f"push_weights: the rollout's model has no tensor {name}")
        if tuple(tensor.shape) != table[name].shape or str(tensor.dtype) != f"torch.{dtype}":
            wanted = f"{dtype} {list(table[name].shape)}"
            raise ValueError(f"push_weights: {name} is {tensor.dtype} {list(tensor.shape)}, the rollout's model has {wanted}")
        yield name, tensor


def _call(engine: Engine, method: str, **kwargs: Any) -> None:
    try:
        engine.collective_rpc(method, kwargs=kwargs)
    except ValueError:
        raise
    except Exception as error:
        # A worker in another process answers with the text of its error only.
        raise ValueError(f"push_weights, {method}: {error}") from error


def _buckets(tensors: Iterable[tuple[str, torch.Tensor]], size: int) -> Iterator[dict[str, torch.Tensor]]:
    bucket: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > size:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = tensor.detach().cpu().contiguous()
        held += tensor.nbytes
    if bucket:
        yield bucket


def _save(bucket: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(bucket, str(path))

"""Checkpoints of a training that belong to no layout: saved from any, resumed in any, with the same bytes from there on.

A checkpoint (see :mod:`tio_megatron.checkpoint.training`) holds four folders in HF's form, each readable on its own: ``model`` (the weights),
``param`` (fp32 main parameters), ``exp_avg`` and ``exp_avg_sq``; and ``state.json`` with all else that decides the future. megatron-core's own
distributed checkpoints are not used underneath: their ``common.pt`` and ``.metadata`` are pickles, and they know nothing of the largest partials.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tio_megatron.checkpoint import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    TrainingDraft,
    latest_training,
    training_state,
    whole_beside,
    write_checkpoint,
)
from tio_megatron.collectives import wire
from tio_megatron.integrations.megatron.resume import checks as checks
from tio_megatron.integrations.megatron.resume.checks import MODEL
from tio_megatron.integrations.megatron.resume.optimizer_state import KINDS, export_state, import_state
from tio_megatron.integrations.megatron.training.random_states import packed, random_states, restore_random_states
from tio_megatron.integrations.megatron.weights.transfer import export_weights, load_weights

logger = logging.getLogger(__name__)

AGREE_EVERY = 256 << 20
"""Bytes after which ranks ask rank 0 whether it can still write."""


@dataclass(frozen=True)
class Restored:
    """What :func:`load_training` found.

    ``position`` and ``settings`` are as they were saved; ``written`` says in which layout and by which versions. ``fresh`` names the random
    states that differed between ranks of another layout and so could not be carried over.
    """

    folder: Path
    step: int
    position: dict[str, Any]
    settings: dict[str, Any]
    written: dict[str, Any]
    fresh: tuple[str, ...]


def save_training(
    root: Path | str,
    model: torch.nn.Module,
    optimizer: Any,
    schedule: Any,
    config: CheckpointConfig,
    *,
    step: int,
    position: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    files: Iterable[Path] = (),
) -> Path:
    """Write a checkpoint into ``root`` and make it the newest. A collective over the world; rank 0 writes, one tensor after the other.

    Whatever happens (a kill at any moment, a full disk) leaves the checkpoints before it whole and the newest of them named.

    Args:
        root: folder of the run's checkpoints, where rank 0 can write; made if it is not there.
        model: this rank's model in DDP, wrapped under ``apply()``, between two steps.
        optimizer: what ``get_megatron_optimizer`` gave.
        schedule: ``OptimizerParamScheduler``, or ``None`` where the caller sets learning rates.
        config: the configuration of the model's HF checkpoint; refused if the model was built with other numbers.
        step: steps taken; names the checkpoint.
        position: where the data stands, in JSON's types.
        settings: what else decides the future (seeds, sizes of batches), in JSON's types; :func:`load_training` compares it.
        files: further files for the folder of the weights (tokenizer).

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks, with one message: nothing to save, ranks disagree, or rank 0 cannot write.
    """
    root, first = Path(root), _rank() == 0
    state = checks.agreed(lambda: checks.local_state(model, optimizer, schedule, config, step=step, position=position, settings=settings))
    everyone = checks.gathered((state.pop("largest"), state.pop("groups"), state.pop("kinds"), state))
    randoms = checks.gathered(random_states())
    if getattr(model, "ddp_config", None) is not None and getattr(model.ddp_config, "overlap_param_gather", False):
        model.start_param_sync(force_sync=True)  # type: ignore[operator]  # else weights of other ranks' shards arrive only with the next forward pass
    with ExitStack() as stack:
        draft: TrainingDraft | None = None

        def begin() -> dict[str, Any]:
            nonlocal draft
            merged = checks.merged(everyone) | {"random": packed(randoms)}
            if first:
                draft = stack.enter_context(TrainingDraft(root, step, checks.bytes_of(config)))
            return merged

        state = checks.agreed(begin)
        fp32 = replace(config, dtype="float32", raw={**config.raw, "dtype": "float32"})
        _write(draft, MODEL, config, lambda before: export_weights(model, config, before=before), files)
        for kind in KINDS:
            _write(draft, kind, fp32, lambda before, kind=kind: export_state(model, optimizer, config, kind, before=before))  # type: ignore[misc]
        return Path(checks.from_first(lambda: str(draft.commit(state)) if draft is not None else ""))


def load_training(
    path: Path | str,
    model: torch.nn.Module,
    optimizer: Any,
    schedule: Any,
    config: CheckpointConfig,
    *,
    settings: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
) -> Restored:
    """Take over a checkpoint, from whatever layout, into this one. A collective over the world; each rank reads what it holds.

    Everything is checked first, the SHA-256 of every file included (ranks of one machine share that work); a refusal changes nothing.

    Args:
        path: the folder of a run's checkpoints (its newest is taken), or one checkpoint.
        model: this rank's model in DDP, wrapped under ``apply()``.
        optimizer: what ``get_megatron_optimizer`` gave.
        schedule: as when it was saved; ``None`` if it was ``None`` then.
        config: the configuration the model was built from.
        settings: compared with those saved, unless ``None``.
        allow: names of fields that may differ (``"settings.lr"``, ``"schedule.max_lr"``, ``"optimizer.clip_grad"``); this run's values hold.

    Raises:
        CheckpointError: on all ranks, with one message: no checkpoint, a file missing, truncated or altered (and which checkpoint beside it is
            whole), another contract, model or training, with the fields named.
    """
    folder = Path(checks.from_first(lambda: str(latest_training(path))))
    try:
        saved = checks.agreed(lambda: training_state(folder))
        checks.same_files_everywhere(folder, saved)
    except CheckpointError as error:  # on all ranks
        beside = checks.from_first(lambda: whole_beside(folder.parent, damaged=folder))
        raise CheckpointError(f"{error}; {beside}") from error
    checks.agreed(lambda: checks.check(folder, saved, model, optimizer, schedule, config, settings, allow))

    def take() -> list[str]:
        with Checkpoint(folder / MODEL) as weights:
            load_weights(model, weights)
        for kind in KINDS:
            with Checkpoint(folder / kind) as tensors:
                import_state(model, optimizer, kind, tensors)
        checks.set_largest(model, config.shape, saved["largest"])
        checks.set_optimizer(optimizer, schedule, saved, allow)
        here = checks.layout()
        return restore_random_states(saved["random"], _rank(), same_layout=here == saved["written"]["layout"])

    fresh = checks.agreed(take, "; the model is loaded in part: do not go on with it")
    if fresh and _rank() == 0:
        logger.info("%s: random states %s differ between ranks and belong to the layout %s: left as they are", folder, fresh, saved["written"]["layout"])
    return Restored(folder, saved["step"], saved["position"], saved["settings"], saved["written"], tuple(fresh))


def _write(
    draft: TrainingDraft | None,
    name: str,
    config: CheckpointConfig,
    export: Callable[[Callable[[int], None]], Iterator[tuple[str, torch.Tensor]]],
    files: Iterable[Path] = (),
) -> None:
    """One folder of a draft. Rank 0 writes; should it fail, the others hear of it within :data:`AGREE_EVERY` bytes."""
    failed: list[Exception] = []
    since = 0

    def before(size: int) -> None:
        nonlocal since
        since += size
        if since >= AGREE_EVERY:
            since = 0
            if _says_stop(bool(failed)):
                raise _Stopped

    def run() -> None:
        stream = export(before)
        if draft is not None:
            try:
                write_checkpoint(draft.path / name, config.raw, stream, files=files)
            except Exception as error:  # also of safetensors: the others must not wait for a rank that gave up
                failed.append(draft.failed(error))
        try:
            for _ in stream:
                pass
        except _Stopped:
            pass
        if failed:
            raise failed[0]

    checks.agreed(run)


class _Stopped(Exception):
    """Rank 0 cannot write any more."""


def _says_stop(failed: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return failed
    flag = torch.tensor([int(failed)], device=wire.device(dist.group.WORLD))
    dist.broadcast(flag, 0)
    return bool(flag.item())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

"""verl's trainer and its rollout meet before the first weights are pushed: a rollout that does not obey the trainer's contract ends the start.

The rollout's workers are asked through verl's own way to them, ``collective_rpc`` of its servers. That returns nothing, so the question carries the
trainer's answer, and a worker that differs, or has no such method because the plug-in did not load in it, is an error there which the trainer sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tio_megatron.integrations import releases
from tio_megatron.integrations.patching import Patch, PatchSet
from tio_megatron.integrations.verl import local_layers, refusals

QUESTION = "tio_agree"
"""A method that vLLM's workers have where the plug-in is on (:func:`..vllm.workers.tio_agree`)."""
SECONDS = 120.0


def enable() -> None:
    """In verl's workers and its driver, whenever they are imported from now on. Harmless when called again.

    Raises:
        ImportError: verl is another version than the supported one.
    """
    if not _switch.is_on:
        releases.require("verl")
    _switch.on()


def disable() -> None:
    """Restore verl. Harmless when not enabled."""
    _switch.undo()


def problems() -> list[str]:
    """One line for each patch of verl or mbridge that went in and is not in force any more in this process."""
    return _switch.problems() + local_layers.problems()


def mine() -> dict[str, Any]:
    """What this process obeys, for the other side."""
    from tio_megatron.integrations.megatron.applied.workers import this_worker

    return this_worker()


def without_us(error: BaseException) -> str | None:
    """What to say of ``error``, if it is that a rollout's worker does not know the question."""
    if QUESTION not in str(error) or "obey different contracts" in str(error):
        return None
    return (
        "verl's rollout would be stock: tio_megatron did not load in a worker of its vLLM, and is in force in the trainer. TIO_CONTRACT in the environment of "
        "every worker (Ray: in runtime_env), tio_megatron installed in it, and tio_megatron among VLLM_PLUGINS, if that is set, would work; or no "
        "TIO_CONTRACT for a stock run"
    )


def ask_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """``ServerAdapter.update_weights``: the trainer's worker that shares a machine with the rollout asks before it sends."""

    @functools.wraps(original)
    async def update_weights(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            await self._execute_method(QUESTION, timeout=SECONDS, args=(mine(),))
        except Exception as error:  # Ray makes classes of its own for what an actor raised
            said = without_us(error)
            if said is None:
                raise
            raise ValueError(said) from error
        return await original(self, weights, *args, **kwargs)

    return update_weights


def ask_servers(original: Callable[..., Any]) -> Callable[..., Any]:
    """``CheckpointEngineManager.build_process_group``: where trainer and rollout share no machine, the driver asks before groups between them are made."""

    @functools.wraps(original)
    def build_process_group(self: Any, rollout: Any) -> Any:
        import ray

        answer = mine()
        asked = [replica.server_handle.collective_rpc.remote(QUESTION, timeout=SECONDS, args=(answer,)) for replica in self.replicas]
        try:
            ray.get(asked)
        except Exception as error:
            said = without_us(error)
            if said is None:
                raise
            raise ValueError(said) from error
        return original(self, rollout)

    return build_process_group


def look_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """``ActorRolloutRefWorker.init_model``: settings that are verl's own."""

    @functools.wraps(original)  # verl's marks of how a method is called are attributes of it
    def init_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        lines = problems()
        if lines:
            works = "name tio_megatron.auto last in VERL_USE_EXTERNAL_MODULES, or take the other patch out"
            raise ValueError("tio_megatron's part in verl is not in force in this worker:\n  " + "\n  ".join(f"{line}; {works}" for line in lines))
        refusals.check(self.config, self.role)
        return original(self, *args, **kwargs)

    return init_model


def same_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Bridge.set_extra_args`` of mbridge, through which ``override_transformer_config`` goes: before it the configuration is ``config.json``'s."""

    @functools.wraps(original)
    def set_extra_args(self: Any, **kwargs: Any) -> Any:
        before = {name: getattr(self.config, name, None) for name in kwargs if name in refusals.MODELS_OWN}
        made = original(self, **kwargs)
        refusals.check_overrides(before, self.config)
        return made

    return set_extra_args


def _patches() -> list[Patch]:
    supported = releases.described("verl")
    rows = (
        ("verl.workers.engine_workers:ActorRolloutRefWorker.init_model", look_first, "every worker passes here with its configuration before it builds"),
        ("verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights", ask_first, "weights go to vLLM's workers through it"),
        ("verl.checkpoint_engine.base:CheckpointEngineManager.build_process_group", ask_servers, "the only place that knows both sides"),
    )
    bridge = Patch(
        "mbridge.core.bridge:Bridge.set_extra_args",
        same_model,
        why="the only place that has config.json's values and the overrides",
        supported=releases.described("mbridge"),
    )
    return [*(Patch(target, build, why=why, supported=supported) for target, build, why in rows), bridge]


_switch = PatchSet(_patches, on_import=True)

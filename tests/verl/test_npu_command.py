"""The command of the recipe for NPUs against verl's own configuration: every option exists, and means what the layout says. make test-verl."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

verl = pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

from hydra import compose, initialize_config_dir  # noqa: E402
from hydra.errors import ConfigCompositionException  # noqa: E402

from examples.qwen3_moe.npu_recipe import RECIPES, command  # noqa: E402
from tio_megatron.integrations.verl import refusals  # noqa: E402
from tio_megatron.integrations.vllm.ascend.refusals import _engine as engine_lines  # noqa: E402

CONFIG = str(Path(verl.__file__).parent / "trainer" / "config")


@pytest.mark.parametrize("name", RECIPES)
def test_verl_takes_every_option(name: str) -> None:
    recipe = RECIPES[name]
    words = command(recipe, "/model", "/data", 8)[3:]
    with initialize_config_dir(CONFIG, version_base=None):
        config = compose("ppo_trainer", overrides=words)
        with pytest.raises(ConfigCompositionException):
            compose("ppo_trainer", overrides=[*words, "actor_rollout_ref.actor.megatron.no_such_option=1"])
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    layout = recipe.trainer.layout
    for side in (actor.megatron, config.actor_rollout_ref.ref.megatron):
        assert side.vanilla_mbridge and side.tensor_model_parallel_size == layout.tp and side.expert_model_parallel_size == layout.ep
    assert actor.megatron.override_transformer_config.calculate_per_token_loss
    assert config.actor_rollout_ref.model.use_remove_padding and rollout.enforce_eager and rollout.calculate_log_probs
    assert (rollout.tensor_model_parallel_size, rollout.expert_parallel_size) == (4, 4 if recipe.rollout.expert_parallel else 1)
    assert (rollout.logprobs_mode, rollout.temperature, config.algorithm.rollout_correction.bypass_mode) == ("raw_logprobs", 1.0, False)
    refusals.check(config.actor_rollout_ref, "actor_rollout_ref")


@pytest.mark.parametrize("name", RECIPES)
def test_neither_plug_in_refuses_what_vllm_is_given(name: str) -> None:
    """vLLM's part of the recipe as verl hands it on, against our refusals under vllm-ascend."""
    with initialize_config_dir(CONFIG, version_base=None):
        rollout = compose("ppo_trainer", overrides=command(RECIPES[name], "/model", "/data", 8)[3:]).actor_rollout_ref.rollout
    given = rollout.engine_kwargs.vllm
    model = dict(enforce_eager=rollout.enforce_eager, dtype=f"torch.{rollout.dtype}", logprobs_mode=rollout.logprobs_mode)
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model, enable_sleep_mode=rollout.enable_sleep_mode),
        cache_config=SimpleNamespace(user_specified_block_size=True, block_size=given.block_size),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        scheduler_config=SimpleNamespace(async_scheduling=given.async_scheduling),
        weight_transfer_config=None,
    )
    assert list(engine_lines(config)) == []
    config.model_config.logprobs_mode = "processed_logprobs"
    assert "no others than raw_logprobs" in next(iter(engine_lines(config))).why

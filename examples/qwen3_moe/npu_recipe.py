"""Qwen3-30B-A3B on Ascend NPUs: two layouts that people run, the contract that serves each, and verl's command for it. *Not run on an NPU.*

``launch/qwen3_moe_30b_npu.sh`` starts it. ``--check`` needs no NPU and no package, torch included: it holds the layouts against the contract.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tio_megatron.contract import Contract, ModelShape
from tio_megatron.contract.words import RolloutLayout, TrainerLayout
from tio_megatron.findings.messages import say
from tio_megatron.integrations.npu_switches import SWITCHES

MODEL = ModelShape(layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=768)
"""Qwen3-30B-A3B."""
FAMILY = "npu-910b"
PACKAGES = {
    "torch_npu": "torch_npu 2.13.0 and CANN",
    "triton": "triton-ascend",
    "mindspeed": "MindSpeed, branch core_r0.16.0",
    "megatron.core": "megatron-core 0.16.1",
    "vllm_ascend": "vllm-ascend 0.23",
    "verl": "verl 0.9.1",
}
"""What a run needs, by the module that is imported."""


@dataclass(frozen=True)
class Recipe:
    """A trainer's layout, a rollout's, and what the pair is for."""

    trainer: TrainerLayout
    rollout: RolloutLayout
    about: str

    @property
    def contract(self) -> Contract:
        """The smallest cuts that serve both."""
        return Contract.for_layouts(self.trainer.layout, self.rollout.layout, family=FAMILY)

    def problems(self) -> list[str]:
        """Why the contract, the model and the layouts do not go together; nothing when they do."""
        found = [f"trainer: {problem}" for problem in self.contract.problems(self.trainer.layout, MODEL)]
        found += [f"rollout: {problem}" for problem in self.contract.problems(self.rollout.layout, MODEL)]
        if self.trainer.layout.tp > MODEL.kv_heads:
            found.append(
                f"trainer: tp {self.trainer.layout.tp} is above the {MODEL.kv_heads} key/value heads, which training refuses; tp 1, 2 or {MODEL.kv_heads} works"
            )
        if self.trainer.ranks % self.rollout.tp:
            found.append(f"{self.trainer.ranks} NPUs do not divide into engines of {self.rollout.tp}")
        return found

    def machines(self, npus: int) -> tuple[int, int]:
        """How many machines with ``npus`` NPUs the layout takes, and how many NPUs of each.

        Raises:
            ValueError: no whole number of machines, or an engine of the rollout would lie over two; says what works.
        """
        ranks, engine = self.trainer.ranks, self.rollout.tp
        if npus >= ranks:
            return 1, ranks
        if ranks % npus or npus % engine:
            works = [str(count) for count in range(engine, ranks + 1, engine) if ranks % count == 0]
            why = f"an engine of {engine} does not lie whole in it" if ranks % npus == 0 else f"{ranks} NPUs are no whole number of such machines"
            raise ValueError(f"a machine of {npus} NPUs: {why}; {', '.join(works)} or more than {ranks} works")
        return ranks // npus, npus


RECIPES = {
    "tp4pp2cp2ep8": Recipe(
        TrainerLayout.of(tp=4, pp=2, cp=2, ep=8, etp=1),
        RolloutLayout(4, False),
        "long sequences: full recomputation, weights and optimizer offloaded between phases",
    ),
    "tp2ep8": Recipe(TrainerLayout.of(tp=2, ep=8, etp=1), RolloutLayout(4, True), "experts whole on both sides, grouped products by torch_npu"),
}


def environment(recipe: Recipe) -> dict[str, str]:
    """What every process of the run must have. The switches are also set by the package; here they reach processes that start before it."""
    contract = json.dumps(recipe.contract.to_dict() | {"vocab_size": MODEL.vocab}, sort_keys=True)
    values = {"TIO_CONTRACT": contract, "VERL_USE_EXTERNAL_MODULES": "tio_megatron.auto", "VLLM_ASCEND_ENABLE_NZ": "0"}
    return values | {switch.name: switch.value for switch in SWITCHES}


def command(recipe: Recipe, model: str, data: str, npus: int, more: Sequence[str] = ()) -> list[str]:
    """verl's command line. Names are those of verl 0.9.1."""
    layout, rollout = recipe.trainer.layout, recipe.rollout
    machines, each = recipe.machines(npus)
    actor, engine = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    options = {
        "model_engine": "megatron",
        "algorithm.adv_estimator": "grpo",
        "data.train_files": data,
        "data.val_files": data,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_fused_kernels": False,
        "actor_rollout_ref.model.use_remove_padding": True,
        f"{actor}.megatron.vanilla_mbridge": True,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.loss_agg_mode": "token-mean",
        f"{engine}.name": "vllm",
        f"{engine}.dtype": "bfloat16",
        f"{engine}.tensor_model_parallel_size": rollout.tp,
        f"{engine}.expert_parallel_size": rollout.tp if rollout.expert_parallel else 1,
        f"{engine}.enforce_eager": True,
        f"{engine}.calculate_log_probs": True,
        # vllm-ascend's sampler gives raw log-probabilities alone, which are the trainer's at temperature 1; packed weights do not sleep
        f"{engine}.logprobs_mode": "raw_logprobs",
        f"{engine}.temperature": 1.0,
        f"{engine}.free_cache_engine": False,
        f"+{engine}.enable_sleep_mode": False,
        f"+{engine}.engine_kwargs.vllm.block_size": 128,
        f"+{engine}.engine_kwargs.vllm.async_scheduling": False,
        "trainer.device": "npu",
        "trainer.nnodes": machines,
        "trainer.n_gpus_per_node": each,
    }
    for side in (f"{actor}.megatron", "actor_rollout_ref.ref.megatron"):
        options |= {
            f"{side}.tensor_model_parallel_size": layout.tp,
            f"{side}.pipeline_model_parallel_size": layout.pp,
            f"{side}.context_parallel_size": layout.cp,
            f"{side}.expert_model_parallel_size": layout.ep,
            f"{side}.expert_tensor_parallel_size": layout.expert_tp,
            f"{side}.sequence_parallel": layout.sp,
            f"{side}.param_offload": True,
        }
    transformer = f"{actor}.megatron.override_transformer_config"
    options |= {
        f"{actor}.megatron.optimizer_offload": True,
        f"{transformer}.recompute_granularity": "full",
        f"{transformer}.recompute_method": "uniform",
        f"{transformer}.recompute_num_layers": 1,
        f"+{transformer}.calculate_per_token_loss": True,
        f"+{transformer}.moe_token_dispatcher_type": recipe.trainer.dispatcher,
        f"+{transformer}.moe_permute_fusion": False,
        f"+{transformer}.moe_grouped_gemm": False,
        f"+{transformer}.apply_rope_fusion": False,
        f"+{transformer}.gradient_accumulation_fusion": False,
        f"+{transformer}.use_flash_attn": False,
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in options.items()), *more]


def told(name: str, recipe: Recipe, model: str, data: str, npus: int, more: Sequence[str] = ()) -> str:
    """The check of one layout, in lines."""
    problems = recipe.problems()
    machines, each = recipe.machines(npus)
    where = f"{recipe.trainer.ranks} NPUs, {machines} machine{'s' if machines > 1 else ''} of {each}"
    lines = [f"{name}: trainer {recipe.trainer}, rollout {recipe.rollout}, {where}; {recipe.about}"]
    cuts = ", ".join(f"{axis} {count}" for axis, count in recipe.contract.to_dict()["cuts"].items())
    lines += [f"  contract: family {recipe.contract.family}, kv_block {recipe.contract.kv_block}, cuts {cuts}"]
    lines += [f"  does not fit: {problem}" for problem in problems] or ["  fits: every product is cut on leaves, on both sides"]
    lines += [f"  export {key}={shlex.quote(value)}" for key, value in environment(recipe).items()]
    lines += ["  " + shlex.join(command(recipe, model, data, npus, more))]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="qwen3_moe_30b_npu", description="Qwen3-30B-A3B on Ascend NPUs. Not run on an NPU by those who wrote it.")
    made.add_argument("--layout", choices=RECIPES, help="which pair of layouts (default with --check: all; else tp2ep8)")
    made.add_argument("--check", action="store_true", help="hold the layouts against the contract and print what would be started; needs no NPU")
    made.add_argument("--model", default="Qwen/Qwen3-30B-A3B", help="the HF folder (default: %(default)s)")
    made.add_argument("--data", default="train.parquet", help="verl's training file (default: %(default)s)")
    made.add_argument("--npus", type=int, default=8, help="NPUs of one machine (default: %(default)s)")
    made.add_argument("more", nargs="*", help="further verl options, after --")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when a layout does not fit, 2 when a run cannot be started here; verl's own otherwise."""
    options = parser().parse_args(arguments)
    if options.npus < 1:
        print(f"qwen3_moe_30b_npu: --npus must be at least 1, got {options.npus}", file=sys.stderr)
        return 2
    names = [options.layout] if options.layout else list(RECIPES) if options.check else ["tp2ep8"]
    for name in names:
        try:
            RECIPES[name].machines(options.npus)
        except ValueError as error:
            print(f"qwen3_moe_30b_npu: --npus {options.npus}, --layout {name}: {error}", file=sys.stderr)
            return 2
    if options.check:
        try:
            for name in names:
                say(told(name, RECIPES[name], options.model, options.data, options.npus, options.more))
            say("not run on an NPU: python -m tio_megatron.ascend_selfcheck comes first there")
            sys.stdout.flush()
        except OSError as error:  # a full disk behind stdout, a reader that has gone
            print(f"qwen3_moe_30b_npu: what was found cannot be written: {error.strerror}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(2)  # the interpreter would try to write the rest once more
        return int(any(RECIPES[name].problems() for name in names))
    missing = [words for module, words in PACKAGES.items() if not _there(module)]
    if missing:
        print(f"qwen3_moe_30b_npu: not installed here: {', '.join(missing)} (docs/ascend.md); --check needs none of them", file=sys.stderr)
        return 2
    recipe = RECIPES[names[0]]
    os.environ.update(environment(recipe))
    line = command(recipe, options.model, options.data, options.npus, options.more)
    os.execv(line[0], line)


def _there(module: str) -> bool:
    top = module.split(".")[0]
    return importlib.util.find_spec(top) is not None and (top == module or importlib.util.find_spec(module) is not None)


if __name__ == "__main__":
    sys.exit(main())

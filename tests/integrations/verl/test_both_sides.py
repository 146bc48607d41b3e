"""verl's trainer meets its rollout before weights are pushed. verl's three symbols are stand-ins here; make test-verl has the real ones."""

import asyncio
import importlib.metadata
import sys
import types

import pytest

from tio_megatron.integrations.verl import both_sides, refusals

CONFIG = {
    "actor": {
        "strategy": "megatron",
        "megatron": {"use_mbridge": True, "vanilla_mbridge": True, "router_replay": {"mode": "disabled"}},
        "qat": {"enable": False},
    },
    "ref": {"strategy": "megatron", "megatron": {"use_mbridge": True, "vanilla_mbridge": True}},
    "model": {"use_fused_kernels": False, "lora_rank": 0, "lora": {"rank": 0}, "mtp": {"enable": False}},
    "rollout": {"name": "vllm", "top_p": 1, "top_k": -1, "temperature": 0.7, "logprobs_mode": "processed_logprobs"},
}


def changed(path, value):
    """The configuration with one setting changed."""
    found = {side: dict(settings) for side, settings in CONFIG.items()}
    at = found
    *names, last = path.split(".")
    for name in names:
        at[name] = dict(at.get(name, {}))
        at = at[name]
    at[last] = value
    return found


@pytest.mark.parametrize(
    "path, value",
    [
        ("actor.strategy", "fsdp"),
        ("ref.strategy", "fsdp2"),
        ("actor.megatron.vanilla_mbridge", False),
        ("ref.megatron.use_mbridge", False),
        ("actor.megatron.dynamic_context_parallel", True),
        ("actor.megatron.router_replay.mode", "R2"),
        ("actor.qat.enable", True),
        ("actor.use_fused_kernels", True),
        ("model.use_fused_kernels", True),
        ("model.lora.rank", 8),
        ("model.mtp.enable", True),
        ("rollout.name", "sglang"),
        ("rollout.top_p", 0.9),
        ("rollout.top_k", 20),
        ("rollout.quantization", "fp8"),
        ("rollout.logprobs_mode", "raw_logprobs"),
    ],
)
def test_a_setting_that_is_not_covered_is_named_as_verl_writes_it(path, value):
    refusals.check(CONFIG, "actor_rollout_ref")
    with pytest.raises(ValueError, match=r"verl cannot obey the contract:\n  actor_rollout_ref\." + path.replace(".", r"\.") + "=.*would work") as refused:
        refusals.check(changed(path, value), "actor_rollout_ref")
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("laid", [{"rms_norm_eps": 0.01, "max_position_embeddings": 9}, {"model_config": {"rope_theta": 5.0, "pad_token_id": 3}}])
def test_a_config_json_that_one_side_alone_would_read_is_refused(laid):
    refusals.check(changed("model.override_config", {"attn_implementation": "eager", "model_config": {"eos_token_id": 7}}), "actor")
    refusals.check(changed("model.override_config", {"moe_config": {"freeze_moe_router": True}}), "actor")
    refusals.check(CONFIG | {"model": {"path": "/model", "hf_config_path": "/model/"}}, "actor")
    with pytest.raises(ValueError, match="unfreeze_rms_norm_eps"):
        refusals.check(changed("model.override_config", {"unfreeze_rms_norm_eps": 0.01}), "actor")
    name = "rms_norm_eps" if "rms_norm_eps" in laid else "rope_theta"
    with pytest.raises(ValueError, match=rf"model.override_config.{name}=.*: the trainer alone would be another model") as refused:
        refusals.check(changed("model.override_config", laid), "actor")
    assert len(str(refused.value).splitlines()) == 2
    rollout = "rollout.engine_kwargs.vllm."
    for name, value in (("model.hf_config_path", "/other"), (f"{rollout}hf_overrides", {"rms_norm_eps": 0.01}), (f"{rollout}hf-config-path", "/other")):
        with pytest.raises(ValueError, match=name):
            refusals.check(changed(name, value), "actor_rollout")
    for odd in (["a"], "x", 3, {"model_config": ["a"]}):
        with pytest.raises(ValueError, match="a mapping of settings is read"):
            refusals.check(changed("model.override_config", odd), "actor")


def test_what_the_models_own_config_json_says_may_be_said_again(tmp_path):
    (tmp_path / "config.json").write_text('{"rms_norm_eps": 1e-06, "rope_theta": 5}')
    model = {"path": str(tmp_path), "override_config": {"rms_norm_eps": 1e-6, "rope_theta": 5.0}}
    refusals.check(CONFIG | {"model": model}, "actor")
    with pytest.raises(ValueError, match="override_config.rms_norm_eps=0.01"):
        refusals.check(CONFIG | {"model": model | {"override_config": {"rms_norm_eps": 0.01, "rope_theta": 5}}}, "actor")


@pytest.mark.parametrize("name", ["logprobs_mode", "logprobs-mode"])
def test_engine_kwargs_are_laid_over_verls_own_mode(name):
    for mode, works in (("raw_logprobs", False), ("raw_logits", False), ("processed_logprobs", True)):
        config = changed(f"rollout.engine_kwargs.vllm.{name}", mode)
        if works:
            refusals.check(config, "rollout")
        else:
            with pytest.raises(ValueError, match=f"engine_kwargs.vllm.{name}='{mode}': the temperature is 0.7"):
                refusals.check(config, "rollout")
    nothing = changed(f"rollout.engine_kwargs.vllm.{name}", None)
    nothing["rollout"]["logprobs_mode"] = "raw_logits"  # verl hands no null on
    with pytest.raises(ValueError, match="rollout.logprobs_mode='raw_logits'"):
        refusals.check(nothing, "rollout")


def test_raw_log_probabilities_are_those_of_temperature_one_and_other_roles_are_not_asked():
    refusals.check(
        changed("rollout.logprobs_mode", "raw_logprobs") | {"rollout": CONFIG["rollout"] | {"logprobs_mode": "raw_logprobs", "temperature": 1.0}}, "rollout"
    )
    refusals.check(changed("rollout.name", "sglang"), "actor")
    refusals.check(changed("actor.strategy", "fsdp"), "rollout")


class ServerAdapter:
    """verl's, with a server that answers as ``error`` says."""

    error = None

    def __init__(self):
        self.asked = []

    async def _execute_method(self, method, non_block=False, timeout=None, args=(), kwargs=None):
        self.asked.append((method, args))
        if self.error is not None:
            raise self.error

    async def update_weights(self, weights, global_steps=None):
        return "pushed", weights, global_steps


class Worker:
    def __init__(self, config):
        self.config, self.role = config, "actor_rollout"

    def init_model(self):
        return "built"

    init_model.marks = "verl's"


class Manager:
    def __init__(self, *servers):
        self.replicas = [types.SimpleNamespace(server_handle=types.SimpleNamespace(collective_rpc=types.SimpleNamespace(remote=server))) for server in servers]

    def build_process_group(self, rollout):
        return "groups", rollout


class Bridge:
    """mbridge's: a configuration from config.json, made again with what is laid over it."""

    def __init__(self):
        self.config = types.SimpleNamespace(layernorm_epsilon=1e-6, softmax_scale=None, recompute_method=None)

    def set_extra_args(self, **kwargs):
        self.config = types.SimpleNamespace(**vars(self.config) | kwargs)
        return "set"


@pytest.fixture
def verl(monkeypatch):
    names = ("verl", "verl.workers", "verl.workers.engine_workers", "verl.workers.rollout", "verl.workers.rollout.vllm_rollout")
    names = (*names, "verl.workers.rollout.vllm_rollout.vllm_rollout", "verl.checkpoint_engine", "verl.checkpoint_engine.base", "ray")
    modules = {name: types.ModuleType(name) for name in names}
    modules["verl.workers.engine_workers"].ActorRolloutRefWorker = Worker
    modules["verl.workers.rollout.vllm_rollout.vllm_rollout"].ServerAdapter = ServerAdapter
    modules["verl.checkpoint_engine.base"].CheckpointEngineManager = Manager
    for name in ("mbridge", "mbridge.core", "mbridge.core.bridge"):
        modules[name] = types.ModuleType(name)
    modules["mbridge.core.bridge"].Bridge = Bridge
    modules["ray"].get = lambda asked: [one() for one in asked]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"verl": "0.9.1"}.get(name) or real(name))
    monkeypatch.setattr(both_sides, "mine", lambda: {"contract": "a"})
    monkeypatch.setattr(ServerAdapter, "error", None)
    both_sides.enable()
    both_sides.enable()
    yield
    both_sides.disable()
    assert asyncio.run(ServerAdapter().update_weights("w")) == ("pushed", "w", None) and "look_first" not in Worker.init_model.__qualname__


ABSENT = "Call to collective_rpc method failed: 'CPUWorker' object has no attribute 'tio_agree'"


def test_weights_are_pushed_after_the_rollout_has_agreed(verl, monkeypatch):
    adapter = ServerAdapter()
    assert asyncio.run(adapter.update_weights("w", global_steps=3)) == ("pushed", "w", 3)
    assert adapter.asked == [("tio_agree", ({"contract": "a"},))]
    monkeypatch.setattr(ServerAdapter, "error", RuntimeError(ABSENT))
    with pytest.raises(
        ValueError, match="verl's rollout would be stock: tio_megatron did not load in a worker of its vLLM.*TIO_CONTRACT in the environment of"
    ):
        asyncio.run(adapter.update_weights("w"))
    for error in (RuntimeError("tio_agree: rollout and trainer obey different contracts (...)"), OSError("the server is gone")):
        monkeypatch.setattr(ServerAdapter, "error", error)
        with pytest.raises(type(error)) as refused:
            asyncio.run(adapter.update_weights("w"))
        assert refused.value is error


def test_where_they_share_no_machine_the_driver_asks_every_server(verl):
    asked = []

    def server(error=None):
        def remote(method, timeout, args):
            asked.append((method, args))

            def answer():
                if error is not None:
                    raise error

            return answer

        return remote

    assert Manager(server(), server()).build_process_group("r") == ("groups", "r")
    assert asked == [("tio_agree", ({"contract": "a"},))] * 2
    with pytest.raises(ValueError, match="verl's rollout would be stock"):
        Manager(server(), server(AttributeError(ABSENT))).build_process_group("r")


def test_settings_are_looked_at_before_a_worker_builds_and_verls_marks_stay(verl):
    assert Worker(CONFIG).init_model() == "built" and Worker.init_model.marks == "verl's"
    with pytest.raises(ValueError, match="strategy='fsdp'"):
        Worker(changed("actor.strategy", "fsdp")).init_model()


@pytest.mark.parametrize("name, value, says", [("softmax_scale", 0.3, "None"), ("layernorm_epsilon", 0.01, "1e-06")])
def test_an_override_that_makes_the_trainer_another_model_is_refused(verl, name, value, says):
    assert Bridge().set_extra_args(recompute_method="uniform", **{name: getattr(Bridge().config, name)}) == "set", "the model's own is none"
    with pytest.raises(
        ValueError, match=rf"override_transformer_config\.{name}={value}: the model's config.json says {says}, and vLLM reads that; leave it out"
    ):
        Bridge().set_extra_args(recompute_method="uniform", **{name: value})


def test_somebody_who_replaces_our_question_is_named_by_every_worker(verl, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(ServerAdapter, "update_weights", lambda self, weights: "theirs")
        with pytest.raises(ValueError, match="vllm_rollout:ServerAdapter.update_weights: replaced by somebody else.*name tio_megatron.auto last in VERL_USE"):
            Worker(CONFIG).init_model()
    assert Worker(CONFIG).init_model() == "built"


def test_another_verl_is_named_at_its_import(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(ImportError, match="verl 0.8.0 is installed; tio_megatron supports verl 0.9.1"):
        both_sides.enable()
    both_sides.disable()

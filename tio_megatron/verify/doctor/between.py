"""What must be the same in the trainer, the rollout and the model that both read; with and without the contract."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.models import Model
from tio_megatron.verify.doctor.options import FLAGS, TOPIC
from tio_megatron.verify.doctor.running import Running, dtype

_NEUTRAL = (None, 1, 1.0)


def check(trainer: Running, rollout: Running, model: Model) -> Iterator[Finding]:
    """All of it."""
    yield from same_model(trainer, model)
    yield from same_dtype(trainer, rollout, model)
    yield from same_distribution(trainer, rollout, model)


def same_model(run: Running, model: Model) -> Iterator[Finding]:
    """Sizes and constants that Megatron-LM takes from its arguments, and vLLM from the model's folder."""
    if run.kind not in ("megatron-lm", "transformer-config") or run.get("use_checkpoint_args"):
        return
    shape = model.shape
    wanted: dict[str, object] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": None if shape.experts else shape.ffn,
        "num_moe_experts": shape.experts or None,
        "moe_router_topk": shape.top_k if shape.experts else None,
        "moe_ffn_hidden_size": shape.moe_ffn if shape.experts else None,
        "layernorm_epsilon": model.rms_eps,
        "rotary_base": model.rope_theta,
        "qk_layernorm": True,
        "moe_router_pre_softmax": False if shape.experts else None,
        "untie_embeddings_and_output_weights": not shape.tied,
    }
    sizes_are_written = "num_layers" in run.written and "hidden_size" in run.written
    for name, theirs in wanted.items():
        ours = run.get(name)
        if ours is None or (theirs is None and name != "num_moe_experts"):
            continue
        if name not in run.written and not sizes_are_written:
            continue  # the sizes come from elsewhere (a checkpoint's arguments), and so may this
        if ours == theirs or (isinstance(ours, int | float) and isinstance(theirs, int | float) and math.isclose(ours, theirs, rel_tol=1e-9)):
            continue
        flag = FLAGS.get(name, "--" + name.replace("_", "-"))
        said = flag.split(" (")[0] + ("" if theirs in (True, False) else f" {_number(theirs)}")
        if isinstance(theirs, bool) and not theirs:
            said = f"leave {flag} out"
        yield Finding("bad", TOPIC, f"trainer: {name} = {ours!r}{run.origin(name)}, the model has {theirs!r}: another function", said)


def _number(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)


def same_dtype(trainer: Running, rollout: Running, model: Model) -> Iterator[Finding]:
    """What both compute in."""
    left = dtype(trainer)
    right = None if rollout.kind == "words" else str(rollout["dtype"])
    origin = rollout.origin("dtype")
    if right == "auto":
        right = "bfloat16" if model.dtype == "float32" else model.dtype
        origin = f" (auto{origin})"
    if left is not None and right is not None and left != right:
        default = f" ({trainer.kind} without --bf16)" if trainer.kind == "megatron-lm" and left == "float32" else ""
        yield Finding("bad", TOPIC, f"trainer computes in {left}{default}, rollout in {right}{origin}", "the same dtype on both sides")


def same_distribution(trainer: Running, rollout: Running, model: Model) -> Iterator[Finding]:
    """What the rollout's log-probabilities are of, and whether the trainer's are of the same."""
    if rollout.kind == "words":
        return
    temperature = rollout.get("temperature")
    taken = model.sampling if rollout.kind == "vllm" and rollout.get("generation_config") == "auto" else {}
    if temperature is None and taken.get("temperature") not in _NEUTRAL:
        temperature = taken["temperature"]
        origin = f"of the model's generation_config.json (generation_config = 'auto'{rollout.origin('generation_config')}), for requests that set none"
    else:
        origin = "as set"
    if temperature not in (*_NEUTRAL, 0, 0.0) and trainer.kind != "verl":
        yield Finding(
            "note",
            TOPIC,
            f"rollout: temperature = {temperature} {origin}: the trainer's log-probabilities must be of logits divided by it too",
            "score with the same temperature; or set temperature 1 in each request",
        )
    mode = rollout.get("logprobs_mode")
    if not str(mode).startswith("processed") and temperature not in (*_NEUTRAL, 0, 0.0):
        yield Finding(
            "bad" if "temperature" in rollout.written else "note",
            TOPIC,
            f"rollout: logprobs_mode = {mode!r}{rollout.origin('logprobs_mode')} with temperature {temperature}: raw log-probabilities are of another "
            "distribution than the sampled one",
            "logprobs_mode processed_logprobs",
        )
    cut = {name: value for name in ("top_k", "top_p", "min_p") if (value := rollout.get(name, taken.get(name))) not in (None, -1, 0, 1, 1.0, 0.0)}
    if cut:
        source = "" if set(cut) & rollout.written else " of the model's generation_config.json"
        yield Finding(
            "note",
            TOPIC,
            f"rollout: {', '.join(f'{name} = {value}' for name, value in cut.items())}{source}: tokens are drawn from a cut distribution; processed "
            "log-probabilities are of it, a trainer's are not",
            "top_k -1 and top_p 1 for training on the samples, or logprobs_mode raw_logprobs",
        )
    if rollout.kind == "verl" and not rollout.get("calculate_log_probs"):
        yield Finding(
            "note",
            TOPIC,
            f"rollout: calculate_log_probs = False{rollout.origin('calculate_log_probs')}: verl does not keep the rollout's, so nobody sees a mismatch",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
        )

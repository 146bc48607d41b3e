"""Recording a Hugging Face model (Qwen3, Qwen3-MoE and models whose modules have the same names), eager or not, with hooks.

Nothing of the model is replaced: modules get hooks, and three functions of transformers that have no module (rotary embedding, grouped and batched
products of experts) are wrapped while recording. All are taken off again, also after an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tio_megatron.checkpoint import require_no_code
from tio_megatron.verify.recorders.scored import in_id_order, keeper, record_head
from tio_megatron.verify.traces.tracer import Tracer
from tio_megatron.verify.traces.writer import TraceWriter

_PLAIN = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "o_proj",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp": "mlp_out",
    "": "mlp_residual",
}
"""Modules of a layer whose output is a point."""

_INPUTS = {"self_attn.o_proj": "attn", "post_attention_layernorm": "attn_residual", "mlp.down_proj": "act"}
"""Modules of a layer whose input is a point."""


def load_hf(folder: Path, dtype: str = "") -> Any:
    """A model of transformers from an HF folder, in evaluation mode and in ``dtype`` ("" for the checkpoint's own).

    Only safetensors are read, and no code of the folder is run.

    Raises:
        ValueError: another word for ``dtype``, or a folder that brings its own code.
        OSError: no checkpoint there.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in ("", "bfloat16", "float16", "float32"):
        raise ValueError(f"dtype {dtype!r}: bfloat16, float16 or float32 is needed")
    chosen = getattr(torch, dtype) if dtype else "auto"
    require_no_code(Path(folder))
    with _bar_on_a_terminal():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=chosen, trust_remote_code=False, use_safetensors=True).eval()


@contextmanager
def _bar_on_a_terminal() -> Iterator[None]:
    """transformers' loading bar where somebody looks at it, and not in a log."""
    from transformers.utils import logging

    shown = bool(logging.is_progress_bar_enabled())
    if shown and not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def record_hf(
    model: Any,
    sequences: Sequence[Sequence[int]],
    folder: Path | str,
    *,
    batch: int = 1,
    temperature: float = 1.0,
    full_vocab: bool = False,
    keep: Sequence[str] | bool = False,
    weights: bool = True,
) -> None:
    """Run ``model`` over ``sequences`` and write a trace. The model's mode is left as it is: dropout that is on is part of what is recorded.

    Args:
        model: a causal language model of transformers.
        sequences: token ids.
        folder: of the trace, see :class:`TraceWriter`.
        batch: sequences in one pass, padded on the right.
        temperature: divides the logits.
        full_vocab: record the whole row of log-probabilities too.
        keep: names of points and parameters whose tensors are kept ("all" for everything).
        weights: record digests of all parameters.

    Raises:
        ValueError: the model has no ``model.layers``, or a token is outside its vocabulary.
    """
    config = model.config
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ValueError(f"{type(model).__name__} has no model.layers; a causal language model of the Llama or Qwen kind is needed")
    largest = max(max(sequence) for sequence in sequences)
    if largest >= config.vocab_size:
        raise ValueError(f"token {largest} is outside the vocabulary of {config.vocab_size}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = {
        "layers": len(layers),
        "moe": [hasattr(layer.mlp, "experts") for layer in layers],
        "tied": bool(config.tie_word_embeddings),
        "hidden": config.hidden_size,
        "head_dim": head_dim,
        "experts": getattr(config, "num_experts", None),
        "top_k": getattr(config, "num_experts_per_tok", None),
    }
    rope = getattr(config, "rope_parameters", None) or {}
    facts = {
        "temperature": temperature,
        "training": bool(model.training),
        "norm_eps": config.rms_norm_eps,
        "rope_theta": rope.get("rope_theta", getattr(config, "rope_theta", None)),
        "dtype": str(model.dtype),
        "attention": config._attn_implementation,
        "experts": getattr(config, "_experts_implementation", None),
        "versions": {"torch": torch.__version__, "transformers": sys.modules["transformers"].__version__ if "transformers" in sys.modules else None},
    }
    with TraceWriter(folder, sequences, engine="hf", shape=shape, facts=facts, keep=keeper(keep)) as writer:
        if weights:
            for name, tensor in hf_weights(model):
                writer.weight(name, tensor)
        tracer = Tracer(writer)
        with hf_hooks(model, tracer):
            for first in range(0, len(sequences), batch):
                group = range(first, min(first + batch, len(sequences)))
                longest = max(len(sequences[i]) for i in group)
                ids = torch.zeros(len(group), longest, dtype=torch.int64)
                targets = torch.full((len(group), longest), -1, dtype=torch.int64)
                runs: list[tuple[int, int, int] | int] = []
                for row, i in enumerate(group):
                    tokens = torch.tensor(list(sequences[i]))
                    ids[row, : len(tokens)], targets[row, : len(tokens) - 1] = tokens, tokens[1:]
                    runs += [(i, 0, len(tokens)), longest - len(tokens)]
                lengths = torch.tensor([len(sequences[i]) for i in group])
                mask = (torch.arange(longest) < lengths[:, None]).long() if int(lengths.min()) < longest else None
                with tracer.rows(runs):
                    out = model(
                        input_ids=ids.to(model.device), attention_mask=None if mask is None else mask.to(model.device), use_cache=False, return_dict=True
                    )
                    record_head(tracer, out.logits.flatten(0, 1), targets.flatten(), temperature=temperature, full_vocab=full_vocab)


def hf_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by the names of an HF checkpoint: fused tensors of experts are taken apart, a tied head is left out."""
    for name, tensor in model.named_parameters():
        if name.endswith(".experts.gate_up_proj"):
            base, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for expert in range(len(tensor)):
                yield f"{base}{expert}.gate_proj.weight", tensor[expert, :half]
                yield f"{base}{expert}.up_proj.weight", tensor[expert, half:]
        elif name.endswith(".experts.down_proj"):
            for expert in range(len(tensor)):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", tensor[expert]
        else:
            yield name, tensor


@contextmanager
def hf_hooks(model: Any, tracer: Tracer) -> Iterator[None]:
    """In this context the model reports its points to ``tracer``."""
    inner = model.model
    with ExitStack() as stack:

        def output(module: torch.nn.Module, name: str) -> None:
            stack.callback(module.register_forward_hook(lambda _m, _i, out: _point(tracer, name, out)).remove)

        def before(module: torch.nn.Module, name: str) -> None:
            stack.callback(module.register_forward_pre_hook(lambda _m, args: _point(tracer, name, args[0])).remove)

        output(inner.embed_tokens, "embed")
        if hasattr(inner, "rotary_emb"):
            stack.callback(inner.rotary_emb.register_forward_pre_hook(_positions(tracer), with_kwargs=True).remove)
        modules = dict(inner.named_modules())
        for index, layer in enumerate(inner.layers):
            for path, part in _PLAIN.items():
                module = modules.get(f"layers.{index}.{path}".rstrip("."))
                if module is not None:
                    output(module, f"layers.{index}.{part}")
            for path, part in _INPUTS.items():
                module = modules.get(f"layers.{index}.{path}")
                if module is not None:
                    before(module, f"layers.{index}.{part}")
            if hasattr(layer.mlp, "experts"):
                _experts(stack, tracer, layer.mlp, index)
        output(inner.norm, "final_norm")
        _rotary(stack, tracer, inner)
        yield


def _point(tracer: Tracer, name: str, value: Any) -> None:
    if tracer.places is None:
        return
    value = value[0] if isinstance(value, tuple) else value
    if value.shape[0] != len(tracer.places):
        value = value.flatten(0, 1)
    tracer.point(name, value.flatten(1))


def _positions(tracer: Tracer) -> Callable[..., None]:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = tracer.places
        given = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if at is not None and given is not None:
            rows = len(at) // given.shape[-1]
            tracer.point("positions", given.expand(rows, -1).reshape(-1))

    return hook


def _rotary(stack: ExitStack, tracer: Tracer, inner: Any) -> None:
    """Queries and keys after rotation: the function has no module, so the name that the attention's file looks up is wrapped."""
    place = sys.modules[type(inner.layers[0].self_attn).__module__]
    original = getattr(place, "apply_rotary_pos_emb", None)
    if original is None:
        return
    current: list[int] = []
    for index, layer in enumerate(inner.layers):
        stack.callback(layer.self_attn.register_forward_pre_hook(lambda _m, _a, index=index: current.append(index)).remove)

    def traced(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = original(q, k, *args, **kwargs)
        if tracer.places is not None and current:
            for name, turned in zip("qk", out, strict=True):  # [b, heads, s, D]
                tracer.point(f"layers.{current[-1]}.{name}_rope", turned.transpose(1, 2).flatten(0, 1).flatten(1))
        return out

    setattr(place, "apply_rotary_pos_emb", traced)  # noqa: B010
    stack.callback(setattr, place, "apply_rotary_pos_emb", original)


class _Linear(TorchFunctionMode):
    """Tells ``seen`` the input and the result of every linear function called in this context."""

    def __init__(self, seen: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.seen(args[0], out)
        return out


def _experts(stack: ExitStack, tracer: Tracer, block: Any, layer: int) -> None:
    """Router and experts of one layer."""
    here = f"layers.{layer}."
    state: dict[str, Any] = {}

    def routed(_module: Any, _args: Any, out: Any) -> None:
        if tracer.places is None:
            return
        logits, scores, ids = out
        ids, scores = in_id_order(ids, scores)
        tracer.point(f"{here}router_logits", logits)
        tracer.point(f"{here}expert_ids", ids)
        tracer.point(f"{here}expert_probs", scores)

    def enter(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tracer.places is None:
            return
        ids = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        assert ids is not None
        k = ids.shape[1]
        rank = ids.argsort(dim=-1, stable=True).argsort(dim=-1)  # slot in ascending id of each choice
        state["queue"] = list(_runs(ids, rank, str(getattr(block.experts.config, "_experts_implementation", "eager") or "eager")))
        state["k"], state["calls"] = k, 0
        mode = _Linear(lambda x, y: _seen(tracer, here, state, x, y))
        mode.__enter__()
        state["mode"] = mode

    def leave(*_: Any) -> None:
        mode = state.pop("mode", None)
        if mode is not None:
            mode.__exit__(None, None, None)

    stack.callback(leave)
    for module, hook in ((block.gate, routed), (block.experts, leave)):
        stack.callback(module.register_forward_hook(hook).remove)
    stack.callback(block.experts.register_forward_pre_hook(enter, with_kwargs=True).remove)
    for name in ("_grouped_linear", "_batched_linear"):
        _wrapped(stack, name, state, lambda x, y: _seen(tracer, here, state, x, y))


def _wrapped(stack: ExitStack, name: str, state: dict[str, Any], seen: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    place = sys.modules.get("transformers.integrations.moe")
    original = getattr(place, name, None)
    if place is None or original is None:
        return

    def traced(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "mode" not in state:
            return original(x, *args, **kwargs)
        # What the product itself calls is not a product of its own.
        mode = state.pop("mode")
        mode.__exit__(None, None, None)
        try:
            out = original(x, *args, **kwargs)
        finally:
            mode.__enter__()
            state["mode"] = mode
        seen(x, out)
        return out

    setattr(place, name, traced)
    stack.callback(setattr, place, name, original)


def _runs(ids: torch.Tensor, rank: torch.Tensor, implementation: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, slots) of the rows of each product, in the order in which an implementation of transformers makes them."""
    n, k = ids.shape
    if implementation == "eager":
        for expert in ids.unique().tolist():  # the loop goes over experts that were chosen, ascending, and over their choices column by column
            column, token = (ids.t() == expert).nonzero(as_tuple=True)
            yield token, rank[token, column]
        return
    order = torch.arange(n * k, device=ids.device)
    if implementation.startswith("grouped"):
        order = torch.sort(ids.reshape(-1))[1]
    yield order // k, rank.reshape(-1)[order]


def _seen(tracer: Tracer, here: str, state: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> None:
    """Two products make a run: the first gives gate and up, the second takes the activation and gives the expert's output."""
    turn, second = divmod(state["calls"], 2)
    state["calls"] += 1
    if turn >= len(state["queue"]):
        return
    tokens, slots = state["queue"][turn]
    if len(tokens) != len(x):
        return
    if not second:
        gate, up = y.chunk(2, dim=-1)
        tracer.experts(f"{here}expert_gate", gate, tokens, slots, state["k"])
        tracer.experts(f"{here}expert_up", up, tokens, slots, state["k"])
    else:
        tracer.experts(f"{here}expert_act", x, tokens, slots, state["k"])
        tracer.experts(f"{here}expert_out", y, tokens, slots, state["k"])

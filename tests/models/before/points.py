"""The named points of a Qwen3 or Qwen3-MoE forward pass, in the order of computation, with what each is made of.

Legend: T tokens, H hidden, Q query heads, G key/value heads, D head size, E experts, K top-k, I width of an (expert's) MLP, V true vocabulary. Rows are
tokens; expert points list a token's experts in ascending id, whatever order an engine keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SCALED = ("expert_scaled", "expert_scaled_out")
"""Points of engines that weight a row of an expert before its down projection."""


@dataclass(frozen=True)
class Point:
    """``op`` computes it from ``parents`` (names of points) and ``weights`` (HF names). ``layer`` is None outside the layers."""

    name: str
    op: str
    parents: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    layer: int | None = None

    @property
    def part(self) -> str:
        """The name without its layer."""
        return self.name.rsplit(".", 1)[-1]


def points(layers: int, moe: Sequence[bool], *, tied: bool = False) -> Iterator[Point]:
    """All points in order; ``moe[l]`` says which layers have experts, ``tied`` whether the head is the embedding."""
    yield Point("positions", "given")
    yield Point("embed", "embedding", (), ("model.embed_tokens.weight",))
    stream = "embed"
    for layer in range(layers):
        yield from _layer(layer, stream, moe[layer])
        stream = f"layers.{layer}.mlp_residual"
    yield Point("final_norm", "norm", (stream,), ("model.norm.weight",))
    yield Point("logits", "product", ("final_norm",), ("model.embed_tokens.weight" if tied else "lm_head.weight",))
    yield Point("logprob_rows", "logprob", ("logits",))
    yield Point("logprob", "logprob", ("logits",))


def _layer(layer: int, stream: str, moe: bool) -> Iterator[Point]:
    def point(part: str, op: str, parents: tuple[str, ...], weights: tuple[str, ...] = ()) -> Point:
        names = tuple(stream if parent == "stream" else parent if parent in ("positions",) else f"layers.{layer}.{parent}" for parent in parents)
        return Point(f"layers.{layer}.{part}", op, names, tuple(f"model.layers.{layer}.{weight}.weight" for weight in weights), layer)

    yield point("attn_norm", "norm", ("stream",), ("input_layernorm",))
    for name in "qkv":
        yield point(f"{name}_proj", "product", ("attn_norm",), (f"self_attn.{name}_proj",))
    for name in "qk":
        yield point(f"{name}_norm", "norm", (f"{name}_proj",), (f"self_attn.{name}_norm",))
    for name in "qk":
        yield point(f"{name}_rope", "rope", (f"{name}_norm", "positions"))
    yield point("attn", "attention", ("q_rope", "k_rope", "v_proj"))
    yield point("o_proj", "product", ("attn",), ("self_attn.o_proj",))
    yield point("attn_residual", "add", ("stream", "o_proj"))
    yield point("mlp_norm", "norm", ("attn_residual",), ("post_attention_layernorm",))
    if moe:
        yield point("router_logits", "product", ("mlp_norm",), ("mlp.gate",))
        yield point("expert_ids", "top_k", ("router_logits",))
        yield point("expert_probs", "routing", ("router_logits", "expert_ids"))
        for name in ("gate", "up"):
            yield point(f"expert_{name}", "expert_product", ("mlp_norm", "expert_ids"), (f"mlp.experts.*.{name}_proj",))
        yield point("expert_act", "swiglu", ("expert_gate", "expert_up"))
        # Two ways to weight a row: before its down projection (stock Megatron) or behind it (everybody else). An engine has one of them.
        yield point("expert_scaled", "scaling", ("expert_act", "expert_probs"))
        yield point("expert_scaled_out", "expert_product", ("expert_scaled", "expert_ids"), ("mlp.experts.*.down_proj",))
        yield point("expert_out", "expert_product", ("expert_act", "expert_ids"), ("mlp.experts.*.down_proj",))
        yield point("mlp_out", "combine", ("expert_scaled_out", "expert_out", "expert_probs", "expert_ids"))
    else:
        for name in ("gate", "up"):
            yield point(f"{name}_proj", "product", ("mlp_norm",), (f"mlp.{name}_proj",))
        yield point("act", "swiglu", ("gate_proj", "up_proj"))
        yield point("mlp_out", "product", ("act",), ("mlp.down_proj",))
    yield point("mlp_residual", "add", ("attn_residual", "mlp_out"))

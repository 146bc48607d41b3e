"""Recording vLLM (Qwen3, Qwen3-MoE): an engine in this process, one rank, eager, stock or under the contract, with hooks on its model's modules.

Sequences are prompts whose log-probabilities are asked for, one request at a time, so a token's position says which row of the trace it is, also in
chunked prefill. The experts' inside and the choice of experts belong to a fused operator and are not recorded; router logits are.

Legend: n tokens of a pass, T of the trace, V vocabulary, D head size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from tio_megatron.verify.recorders.scored import keeper
from tio_megatron.verify.traces.digest import row_digests
from tio_megatron.verify.traces.tracer import Tracer
from tio_megatron.verify.traces.writer import TraceWriter

KV_BYTES = 256 << 20
"""Keys and values of one request; left alone vLLM wants most of the machine's memory, and refuses to start where others use it."""

_NO_TEMPERATURE = "record: vLLM gives log-probabilities of prompts without a temperature; record with 1, and compare the rollout's own with tio logdiff"


def run_vllm(model: Path, sequences: Sequence[Sequence[int]], folder: Path, *, dtype: str = "", stock: bool = False, **options: Any) -> None:
    """Start an engine on an HF folder and record it. ``options`` as of :func:`record_vllm`."""
    if options.get("temperature", 1.0) != 1.0:
        raise ValueError(_NO_TEMPERATURE)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must live in this process
    from tio_megatron.checkpoint import CheckpointConfig
    from tio_megatron.integrations.vllm import engine_options
    from tio_megatron.integrations.vllm.tracing import engine

    config = CheckpointConfig.from_file(model / "config.json")
    longest = max(map(len, sequences)) + 1
    common: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": dtype or config.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": longest,
        "enable_prefix_caching": False,
    }
    common |= {"max_logprobs": -1, "block_size": 64, "kv_cache_memory_bytes": KV_BYTES}
    llm = engine(str(model), **(common if stock else engine_options(**common)))
    record_vllm(llm, config, sequences, folder, contract=not stock, **options)


@torch.no_grad()
def record_vllm(
    llm: Any,
    config: Any,
    sequences: Sequence[Sequence[int]],
    folder: Path | str,
    *,
    temperature: float = 1.0,
    full_vocab: bool = False,
    keep: Sequence[str] | bool = False,
    weights: bool = True,
    contract: bool | None = None,
) -> None:
    """Ask ``llm`` for the log-probabilities of ``sequences`` and write a trace.

    Args:
        llm: a ``vllm.LLM`` with ``enforce_eager=True``, one rank, in this process, without prefix caching.
        config: the :class:`tio_megatron.checkpoint.CheckpointConfig` of its checkpoint.
        sequences: token ids.
        folder: of the trace.
        temperature: must be 1: vLLM gives the log-probabilities of prompts without one.
        full_vocab: record the whole row of log-probabilities too (slow: vLLM returns it as a dictionary).
        keep: names of points and parameters whose tensors are kept ("all" for everything).
        weights: record digests of the parameters that can be told apart in vLLM's packed ones.
        contract: whether the plug-in is on, for the report.

    Raises:
        ValueError: a temperature, or an engine whose model lives in another process.
    """
    from tio_megatron.integrations.vllm.tracing import prompt_logprobs

    if temperature != 1.0:
        raise ValueError(_NO_TEMPERATURE)
    found: list[Any] = []
    llm.apply_model(found.append)
    if not found:
        raise ValueError("record: the engine's model lives in another process; start it with VLLM_ENABLE_V1_MULTIPROCESSING=0 and one rank")
    model, sizes = found[0], config.shape
    layers = model.model.layers
    shape = {
        "layers": len(layers),
        "moe": [hasattr(layer.mlp, "experts") for layer in layers],
        "tied": sizes.tied,
        "hidden": sizes.hidden,
        "head_dim": sizes.head_dim,
        "experts": sizes.experts or None,
        "top_k": sizes.top_k or None,
    }
    facts = {
        "temperature": 1.0,
        "training": bool(model.training),
        "norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "dtype": str(next(model.parameters()).dtype),
        "contract": contract,
        "weights": "some",
        "versions": {"torch": torch.__version__},
    }
    with TraceWriter(folder, sequences, engine="vllm", shape=shape, facts=facts, keep=keeper(keep)) as writer:
        if weights:
            for name, tensor in vllm_weights(model, sizes):
                writer.weight(name, tensor)
        tracer = Tracer(writer)
        starts = [sum(writer.lengths[:i]) for i in range(len(sequences))]
        run = _Run(tracer, torch.from_numpy(writer.tokens))
        with _hooks(model, run, sizes):
            for start, sequence in zip(starts, sequences, strict=True):
                run.start = start
                run.stop = start + len(sequence)
                table = prompt_logprobs(llm, list(sequence), -1 if full_vocab else 0)
                run.start = -1
                values = torch.tensor([row[token] for row, token in zip(table[1:], sequence[1:], strict=True)], dtype=torch.float32)
                at = torch.arange(start, start + len(sequence))
                writer.put("logprob", torch.cat([values, torch.zeros(1)]), at)
                if full_vocab and len(sequence) > 1:
                    rows = torch.tensor([[row[token] for token in range(sizes.vocab)] for row in table[1:]], dtype=torch.float32)
                    writer.put("logprob_rows", rows, at[:-1])


def vllm_weights(model: Any, sizes: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by their HF names, taken out of vLLM's packed ones; what a backend has packed in a form of its own is left out."""
    rows = {"q": sizes.heads * sizes.head_dim, "k": sizes.kv_heads * sizes.head_dim, "v": sizes.kv_heads * sizes.head_dim}
    for name, tensor in model.named_parameters():
        base = name.rsplit(".", 2)[0]
        if name.endswith("self_attn.qkv_proj.weight"):
            if tensor.shape == (sum(rows.values()), sizes.hidden):
                for part, weight in zip("qkv", tensor.split(list(rows.values())), strict=True):
                    yield f"{base}.{part}_proj.weight", weight
        elif name.endswith("mlp.gate_up_proj.weight"):
            if tensor.shape == (2 * sizes.ffn, sizes.hidden):
                for part, weight in zip(("gate", "up"), tensor.chunk(2), strict=True):
                    yield f"{base}.{part}_proj.weight", weight
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            if tensor.shape[0] >= sizes.vocab and tensor.shape[1:] == (sizes.hidden,):
                yield name, tensor[: sizes.vocab]
        elif name.endswith("norm.weight") or (name.endswith("mlp.gate.weight") and tensor.shape == (sizes.experts, sizes.hidden)):
            yield name, tensor


class _Run:
    """Which tokens the pass under way computes."""

    def __init__(self, tracer: Tracer, tokens: torch.Tensor) -> None:
        self.tracer, self.tokens, self.start, self.stop = tracer, tokens, -1, -1
        self.at: torch.Tensor | None = None
        self.seen: dict[int, int] = {}

    def begin(self, ids: torch.Tensor | None, positions: torch.Tensor) -> None:
        """A pass over ``positions`` [n] begins; one that is not about the sequence asked for (a warm-up) is not recorded."""
        self.at = None
        if self.start < 0 or ids is None:
            return
        at = self.start + positions.to("cpu", torch.int64)
        inside = at < self.stop  # behind it: the token that vLLM samples because it must
        at = at.where(inside, -1)
        real = at[at >= 0]
        if len(real) and torch.equal(self.tokens[real], ids.to("cpu", torch.int64)[at >= 0]):
            self.at = at
            self.tracer.writer.forward(at)

    def put(self, name: str, value: Any) -> None:
        """``value`` [n, ...]"""
        if self.at is not None and isinstance(value, torch.Tensor) and value.shape[0] == len(self.at):
            self.tracer.writer.put(name, value.reshape(len(self.at), -1), self.at)

    def end_of_layers(self, hidden: torch.Tensor) -> None:
        """Remember which row each final hidden state belongs to: logits are computed from some of them, later."""
        if self.at is not None and hidden.shape[0] == len(self.at):
            self.put("final_norm", hidden)
            self.seen.update(zip(row_digests(hidden).tolist(), self.at.tolist(), strict=True))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None, vocab: int) -> None:
        if self.start < 0 or out is None:
            return
        at = torch.tensor([self.seen.get(digest, -1) for digest in row_digests(hidden).tolist()], dtype=torch.int64)
        if bool((at >= 0).any()):
            self.tracer.writer.put("logits", out[:, :vocab], at)


@contextmanager
def _hooks(model: Any, run: _Run, sizes: Any) -> Iterator[None]:
    inner = model.model
    rows = [sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim]
    with ExitStack() as stack:

        def after(module: Any, work: Any) -> None:
            stack.callback(module.register_forward_hook(lambda _m, _a, out: work(out)).remove)

        def begin(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
            run.begin(given.get("input_ids"), given["positions"])

        # On the whole model: the inner one's class, made for torch.compile, calls past its hooks.
        stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        after(inner.embed_tokens, lambda out: run.put("embed", out))
        for index, layer in enumerate(inner.layers):
            here = f"layers.{index}."
            attention = layer.self_attn
            after(layer.input_layernorm, lambda out, index=index, here=here: _normed(run, out, f"{here}attn_norm", f"layers.{index - 1}.mlp_residual"))
            after(attention.qkv_proj, lambda out, here=here: _split(run, here, _first(out), rows))
            for name in "qk":
                after(getattr(attention, f"{name}_norm"), lambda out, name=name, here=here: run.put(f"{here}{name}_norm", out))
            # Queries and keys as attention takes them: the rotary module is one for all layers.
            stack.callback(attention.attn.register_forward_pre_hook(lambda _m, args, here=here: _turned(run, here, args)).remove)
            after(attention.attn, lambda out, here=here: run.put(f"{here}attn", out))
            after(attention.o_proj, lambda out, here=here: run.put(f"{here}o_proj", _first(out)))
            after(layer.post_attention_layernorm, lambda out, here=here: _normed(run, out, f"{here}mlp_norm", f"{here}attn_residual"))
            if hasattr(layer.mlp, "experts"):
                after(layer.mlp.gate, lambda out, here=here: run.put(f"{here}router_logits", _first(out)))
            else:
                after(layer.mlp.gate_up_proj, lambda out, here=here: _halves(run, here, _first(out)))
                after(layer.mlp.act_fn, lambda out, here=here: run.put(f"{here}act", out))
            after(layer.mlp, lambda out, here=here: run.put(f"{here}mlp_out", out))
        last = f"layers.{len(inner.layers) - 1}.mlp_residual"

        def final(out: Any) -> None:
            if isinstance(out, tuple):
                run.put(last, out[1])
            run.end_of_layers(_first(out))

        after(inner.norm, final)

        def logits(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            hidden = kwargs.get("hidden_states", args[1] if len(args) > 1 else None)
            if hidden is not None:
                run.logits(hidden, out, sizes.vocab)

        stack.callback(model.logits_processor.register_forward_hook(logits, with_kwargs=True).remove)
        yield


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _normed(run: _Run, out: Any, name: str, residual: str) -> None:
    """vLLM's norm adds first and returns the sum beside the result; the first layer's has nothing to add."""
    if isinstance(out, tuple):
        run.put(residual, out[1])
    run.put(name, _first(out))


def _split(run: _Run, here: str, out: torch.Tensor, rows: list[int]) -> None:
    for name, part in zip("qkv", out.split(rows, dim=-1), strict=True):
        run.put(f"{here}{name}_proj", part)


def _turned(run: _Run, here: str, args: tuple[Any, ...]) -> None:
    for name, part in zip("qk", args[:2], strict=True):
        run.put(f"{here}{name}_rope", part)


def _halves(run: _Run, here: str, out: torch.Tensor) -> None:
    for name, part in zip(("gate", "up"), out.chunk(2, dim=-1), strict=True):
        run.put(f"{here}{name}_proj", part)

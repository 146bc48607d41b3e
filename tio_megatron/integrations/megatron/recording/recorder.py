"""Recording a megatron-core model in a layout, stock or under the contract, with hooks: every rank writes its part, rank 0 puts them together.

Tensor, sequence, expert, pipeline and context parallelism (zig-zag; stock has that with Transformer Engine only). Every rank is given whole sequences; of
data-parallel copies the first is recorded.

Legend: s tokens of a pass (padded), n of them on this rank, H hidden, D head size, G key/value groups of this rank, r queries per group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tio_megatron.integrations.megatron.recording.experts import hook_experts
from tio_megatron.layers.context import own_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.traces.merge import merge_parts
from tio_megatron.traces.scored import in_id_order, keeper, record_head, shape_of
from tio_megatron.traces.tracer import Tracer
from tio_megatron.traces.writer import TraceWriter


@torch.no_grad()
def record_megatron(
    model: Any,
    config: Any,
    sequences: Sequence[Sequence[int]],
    folder: Path | str,
    *,
    temperature: float = 1.0,
    full_vocab: bool = False,
    keep: Sequence[str] | bool = False,
    weights: bool = True,
) -> None:
    """Run ``model`` over ``sequences``, one in a pass, and write a trace; every rank calls it with the same arguments.

    Args:
        model: a ``GPTModel``, possibly wrapped, with its weights; built under the contract or stock. Its mode is left as it is.
        config: the :class:`tio_megatron.checkpoint.CheckpointConfig` of its checkpoint.
        sequences: token ids.
        folder: of the trace, seen by all ranks; the ranks' parts lie below it until rank 0 has joined them.
        temperature: divides the logits.
        full_vocab: record the whole row of log-probabilities too.
        keep: names of points and parameters whose tensors are kept ("all" for everything).
        weights: record digests of all parameters.

    Raises:
        ValueError: stock with context parallelism, or more tensor-parallel ranks than key/value groups.
    """
    from tio_megatron.integrations.megatron.weights.pieces import Place, unwrap
    from tio_megatron.integrations.megatron.weights.transfer import export_weights

    inner: Any = unwrap(model)
    place, folder = Place.current(), Path(folder)
    groups = inner.pg_collection
    setting = getattr(inner, "tio_setting", None)
    if setting is None and groups.cp.size() > 1:
        raise ValueError(
            "record: stock megatron-core cuts sequences with Transformer Engine only, which is not recorded; cp = 1 works, and so does the contract"
        )
    sizes = config.shape
    if sizes.kv_heads % place.tp:
        raise ValueError(f"record: {place.tp} tensor-parallel ranks for {sizes.kv_heads} key/value groups; use at most as many ranks as groups")
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout = {"tp": place.tp, "ep": place.ep, "etp": place.etp, "sp": bool(inner.config.sequence_parallel), "pp": groups.pp.size(), "cp": groups.cp.size()}
    facts = {
        "temperature": temperature,
        "training": bool(inner.training),
        "norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "dtype": config.dtype,
        "layout": layout,
        "contract": setting is not None,
        "vocab_rows": int(inner.vocab_size),
        "versions": {"torch": torch.__version__},
    }
    part = folder / f"rank-{rank}"
    with TraceWriter(part, sequences, engine="megatron", shape=shape_of(sizes), facts=facts, keep=keeper(keep), rank=rank) as writer:
        if weights:
            for name, tensor in export_weights(inner, config):
                if tensor is not None:
                    writer.weight(name, tensor)
        tracer = Tracer(writer)
        stage = _Stage(tracer, place, groups, bool(inner.config.sequence_parallel), sizes)
        with _hooks(inner, stage, ordered=setting is not None):
            for index, sequence in enumerate(sequences):
                length = -(-len(sequence) // stage.multiple) * stage.multiple
                with tracer.rows([(index, 0, len(sequence)), length - len(sequence)]):
                    (_ordered if setting is not None else _stock)(model, inner, stage, list(sequence), length, temperature, full_vocab)
    if dist.is_initialized():
        dist.barrier()
    if rank == 0:
        merge_parts([folder / f"rank-{i}" for i in range(dist.get_world_size() if dist.is_initialized() else 1)], folder)
    if dist.is_initialized():
        dist.barrier()


class _Stage:
    """What the hooks need to know: which tokens this rank has, and which columns of them."""

    def __init__(self, tracer: Tracer, place: Any, groups: Any, sliced: bool, sizes: Any) -> None:
        self.tracer, self.tp, self.rank, self.sliced, self.sizes = tracer, place.tp, place.tp_rank, sliced and place.tp > 1, sizes
        self.cut = Sequences(None, groups.cp.rank(), groups.cp.size())
        self.first = groups.dp.rank() == 0
        """Of data-parallel copies, which all have the same tokens, one is recorded."""
        chunks = 2 * self.cut.ranks if self.cut.ranks > 1 else 1
        self.multiple = math.lcm(chunks, self.cut.ranks * self.tp if self.sliced else 1)

    @property
    def running(self) -> bool:
        """Whether a pass is under way, recorded from this rank or not."""
        return self.tracer.places is not None

    @property
    def on(self) -> bool:
        """Whether this rank's tokens are recorded."""
        return self.running and self.first

    @property
    def at(self) -> torch.Tensor:
        """[n] rows of the trace of this rank's tokens, before sequence parallelism."""
        at = self.tracer.places
        assert at is not None
        return own_tokens(at[None], self.cut)[0]

    def owned(self, count: int) -> torch.Tensor:
        """[count] rows of the trace of the tokens that this rank alone stands for, -1 for the others."""
        at = self.at.chunk(self.tp)[self.rank] if self.sliced else self.at
        if len(at) != count:
            raise ValueError(f"record: a layer routes {count} tokens, {len(at)} were expected")
        return at if self.first and (self.sliced or not self.rank) else torch.full_like(at, -1)

    def replicated(self, name: str, value: torch.Tensor) -> None:
        """A tensor [n, 1, ...] that every rank holds, or holds its slice of under sequence parallelism."""
        if not self.on:
            return
        at = self.at
        if self.sliced:
            at = at.chunk(self.tp)[self.rank]
        elif self.rank:
            return
        value = value.reshape(len(at), -1)
        self.tracer.writer.put(name, value, at)

    def columns(self, name: str, value: torch.Tensor, width: int | None = None) -> None:
        """A tensor [n, ...] of which this rank has its columns; ``width`` of the whole, where the last rank's columns are padded."""
        if not self.on:
            return
        at = self.at
        value = value.reshape(len(at), -1)
        whole = width if width is not None else value.shape[1] * self.tp
        start = self.rank * value.shape[1]
        value = value[:, : max(0, whole - start)]
        if value.shape[1]:
            self.tracer.writer.put(name, value, at, columns=start, width=[whole])


def _ordered(model: Any, inner: Any, stage: _Stage, tokens: list[int], length: int, temperature: float, full_vocab: bool) -> None:
    from tio_megatron.integrations.megatron.scoring.logprobs import token_logprobs

    rows = [list(range(len(tokens)))] if full_vocab else None
    training = inner.training
    scores = token_logprobs(model, [tokens], temperature=temperature, rows=rows)
    inner.train(training)
    if scores is None or not stage.on or stage.rank or stage.cut.rank:
        return
    at = stage.tracer.places
    assert at is not None
    real = at[: len(tokens)]
    if full_vocab:
        stage.tracer.writer.put("logprob_rows", scores.rows[0], real)
    stage.tracer.writer.put("logprob", torch.cat([scores.logprobs[0], torch.zeros(1)]), real)


def _stock(model: Any, inner: Any, stage: _Stage, tokens: list[int], length: int, temperature: float, full_vocab: bool) -> None:
    from tio_megatron.integrations.megatron.scoring.tracing import forward

    ids = torch.tensor([tokens + [0] * (length - len(tokens))])
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    out = forward(model, ids, torch.arange(length)[None], hidden)  # [1, s, V / tp], or V where the output is gathered; None on an earlier stage
    if out is None:
        return
    parts = [torch.empty_like(out) for _ in range(stage.tp)]
    if stage.tp > 1 and out.shape[-1] < inner.vocab_size:
        dist.all_gather(parts, out.contiguous(), group=inner.pg_collection.tp)
    else:
        parts = [out]
    if not stage.on or stage.rank:
        return
    whole = torch.cat(parts, -1)[0, :, : stage.sizes.vocab]
    targets = torch.tensor([*tokens[1:], -1] + [-1] * (length - len(tokens)))
    suspended, stage.tracer.writer = stage.tracer.writer, _Without(stage.tracer.writer, "logits")  # type: ignore[assignment]
    try:
        record_head(stage.tracer, whole, targets, temperature=temperature, full_vocab=full_vocab)
    finally:
        stage.tracer.writer = suspended


class _Without:
    """A writer that leaves one point out: the hooks have recorded it by columns."""

    def __init__(self, writer: TraceWriter, name: str) -> None:
        self._writer, self._name = writer, name

    def put(self, name: str, *args: Any, **kwargs: Any) -> None:
        if name != self._name:
            self._writer.put(name, *args, **kwargs)


@contextmanager
def _hooks(inner: Any, stage: _Stage, *, ordered: bool) -> Iterator[None]:
    with ExitStack() as stack:

        def after(module: Any, work: Any) -> None:
            stack.callback(module.register_forward_hook(lambda _m, _a, out: work(out)).remove)

        def before(module: Any, work: Any) -> None:
            stack.callback(module.register_forward_pre_hook(lambda _m, args, kwargs: work(args, kwargs), with_kwargs=True).remove)

        def replicated(name: str) -> Callable[[Any], None]:
            return lambda out: stage.replicated(name, out[0] if isinstance(out, tuple) else out)

        if inner.pre_process:
            after(inner.embedding, replicated("embed"))
        for layer in inner.decoder.layers:
            here = f"layers.{layer.layer_number - 1}."
            attention = layer.self_attention
            after(layer.input_layernorm, replicated(f"{here}attn_norm"))
            after(attention.linear_qkv, lambda out, here=here: _qkv(stage, here, out[0]))
            for name in ("q", "k"):
                norm = getattr(attention, f"{name}_layernorm", None)
                if norm is not None:
                    after(norm, lambda out, name=name, here=here: stage.columns(f"{here}{name}_norm", out))
            before(attention.core_attention, lambda args, kwargs, here=here: _turned(stage, here, args))
            after(attention.core_attention, lambda out, here=here: stage.columns(f"{here}attn", out))
            after(attention.linear_proj, replicated(f"{here}o_proj"))
            before(layer.pre_mlp_layernorm, lambda args, kwargs, here=here: stage.replicated(f"{here}attn_residual", args[0]))
            after(layer.pre_mlp_layernorm, replicated(f"{here}mlp_norm"))
            if hasattr(layer.mlp, "router"):
                _router(stack, stage, layer.mlp.router, here)
                hook_experts(stack, stage, layer.mlp, here, ordered=ordered)
            else:
                after(layer.mlp.linear_fc1, lambda out, here=here: _gate_up(stage, here, out[0]))
                before(layer.mlp.linear_fc2, lambda args, kwargs, here=here: stage.columns(f"{here}act", args[0]))
            after(layer.mlp, replicated(f"{here}mlp_out"))
            after(layer, replicated(f"{here}mlp_residual"))
        if inner.post_process:
            after(inner.decoder.final_layernorm, replicated("final_norm"))
            after(inner.output_layer, lambda out: stage.columns("logits", out[0] if isinstance(out, tuple) else out, stage.sizes.vocab))
        yield


def _qkv(stage: _Stage, here: str, out: torch.Tensor) -> None:
    """Megatron interleaves by group: ``[r queries, key, value]``, group after group."""
    if not stage.on:
        return
    sizes = stage.sizes
    per = sizes.heads // sizes.kv_heads
    split = out.reshape(out.shape[0], sizes.kv_heads // stage.tp, per + 2, sizes.head_dim)
    for name, part in (("q", split[:, :, :per]), ("k", split[:, :, per]), ("v", split[:, :, per + 1])):
        stage.columns(f"{here}{name}_proj", part.reshape(len(out), -1))


def _turned(stage: _Stage, here: str, args: tuple[Any, ...]) -> None:
    for name, value in zip("qk", args[:2], strict=True):
        stage.columns(f"{here}{name}_rope", value)


def _gate_up(stage: _Stage, here: str, out: torch.Tensor) -> None:
    for name, half in zip(("gate", "up"), out.chunk(2, -1), strict=True):
        stage.columns(f"{here}{name}_proj", half)


def _router(stack: ExitStack, stage: _Stage, router: Any, here: str) -> None:
    """Logits come from a method, so it is wrapped on the instance; the choice from the module's output, stock's (a dense map) or ours (compact)."""
    original = router.gating

    def gating(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = original(hidden)
        stage.replicated(f"{here}router_logits", logits)
        return logits

    router.gating = gating
    stack.callback(delattr, router, "gating")

    def chosen(_module: Any, _args: Any, out: Any) -> None:
        if not stage.on:
            return
        probs, chosen = out
        if chosen.dtype == torch.bool:
            k = stage.sizes.top_k
            if bool((chosen.sum(-1) != k).any()):
                return
            ids = chosen.nonzero()[:, 1].view(-1, k)
            probs = probs.gather(1, ids)
        else:
            ids, probs = in_id_order(chosen, probs)
        stage.replicated(f"{here}expert_ids", ids)
        stage.replicated(f"{here}expert_probs", probs)

    stack.callback(router.register_forward_hook(chosen).remove)

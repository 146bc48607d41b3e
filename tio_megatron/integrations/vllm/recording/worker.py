"""The side of a recording that lives in vLLM's workers: hooks on this rank's part of the model, and its part of the trace.

Legend: n tokens of a pass, T of the trace, V vocabulary, D head size, I width of an expert, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tio_megatron.contract import ModelShape
from tio_megatron.integrations.vllm.recording.experts import hook_experts
from tio_megatron.models import Block, Shard, architecture_of, moe_layers, parameters
from tio_megatron.models.description import SIZES
from tio_megatron.traces.digest import row_digests
from tio_megatron.traces.scored import keeper
from tio_megatron.traces.writer import TraceWriter


class RecordingWorker:
    """Methods for ``collective_rpc``; give this class as ``worker_extension_cls``."""

    def tio_trace_start(self, asked: dict[str, Any]) -> int:
        """Put hooks on and open this rank's part; returns how many ranks there are.

        Raises:
            ValueError: fewer key/value heads than ranks.
        """
        from tio_megatron.integrations.vllm.tracing import place, require_whole_heads

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        rank, ranks = place()
        sizes = asked["sizes"]
        require_whole_heads(sizes.kv_heads, ranks)
        facts = asked["facts"] | {"dtype": str(next(model.parameters()).dtype), "layout": {"tp": ranks, "ep": self._tio_ep(model)}}
        folder = Path(asked["folder"]) / f"rank-{rank}"
        writer = TraceWriter(folder, asked["sequences"], engine="vllm", shape=asked["shape"], facts=facts, keep=keeper(asked["keep"]), rank=rank)
        if asked["weights"]:
            _weights(writer, model, sizes, asked["checkpoint"], rank)
        run = _Run(writer, rank, ranks)
        stack = ExitStack()
        stack.enter_context(_hooks(model, run, sizes))
        self.__dict__["_tio_trace"] = run, stack
        return ranks

    def tio_trace_next(self, number: int) -> None:
        """Passes from here on are about a sequence; -1: about none of them."""
        run, _ = self.__dict__["_tio_trace"]
        run.choose(number)

    def tio_trace_finish(self) -> None:
        """Take the hooks off and finish the part."""
        run, stack = self.__dict__.pop("_tio_trace")
        stack.close()
        run.writer.finish()

    @staticmethod
    def _tio_ep(model: Any) -> int:
        layer = next((layer for layer in model.model.layers if hasattr(layer.mlp, "experts")), None)
        return int(layer.mlp.ep_size) if layer is not None and layer.mlp.experts.routed_experts.use_ep else 1


def _weights(writer: TraceWriter, model: Any, sizes: Any, checkpoint: str | None, rank: int) -> None:
    """Digests of parameters, on the rank that has them whole."""
    seen = set()
    if hasattr(model, "ledger"):
        from tio_megatron.integrations.vllm.names import whole_tensors

        for name, tensor in whole_tensors(model):
            if tensor is not None:
                writer.weight(name, tensor)
        return
    if rank:
        return
    for name, tensor in vllm_weights(model, sizes):
        writer.weight(name, tensor)
        seen.add(name)
    if checkpoint is not None:
        from tio_megatron.checkpoint import Checkpoint

        with Checkpoint(checkpoint) as held:
            for name, tensor in held.tensors():
                if name not in seen:
                    writer.weight(name, tensor)
                    writer.weights[name]["origin"] = "checkpoint"


def vllm_weights(model: Any, sizes: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by their HF names, taken out of vLLM's packed ones; what a backend has packed in a form of its own is left out."""
    held = dict(model.named_parameters())
    for placed in parameters(sizes):
        tensor, rows = held.get(placed.vllm), [spec.shape[0] for spec in placed.specs]
        if tensor is None or placed.parameter.of_experts or placed.parameter.shard is Shard.ROW:
            continue
        if placed.parameter.shard is Shard.VOCAB:
            rows.append(max(0, tensor.shape[0] - rows[0]))  # padding
        if tensor.shape == (sum(rows), *placed.specs[0].shape[1:]):
            for spec, part in zip(placed.specs, tensor.split(rows), strict=False):
                yield spec.name, part


class _Run:
    """Which tokens the pass under way computes, and which columns this rank has."""

    def __init__(self, writer: TraceWriter, rank: int, ranks: int) -> None:
        self.writer, self.rank, self.ranks = writer, rank, ranks
        self.tokens = torch.from_numpy(writer.tokens)
        self.start = self.stop = -1
        self.at: torch.Tensor | None = None
        self.seen: dict[int, int] = {}

    def choose(self, number: int) -> None:
        """The sequence that passes are about; -1 for none."""
        self.start = self.stop = -1
        if number >= 0:
            self.start = sum(self.writer.lengths[:number])
            self.stop = self.start + self.writer.lengths[number]

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
            self.writer.forward(at)

    def put(self, name: str, value: Any) -> None:
        """``value`` [n, ...], the same on every rank."""
        if self.rank == 0 and self.at is not None and isinstance(value, torch.Tensor) and value.shape[0] == len(self.at):
            self.writer.put(name, value.reshape(len(self.at), -1), self.at)

    def columns(self, name: str, value: Any) -> None:
        """``value`` [n, ...], of which this rank has its equal share of columns."""
        if self.at is not None and isinstance(value, torch.Tensor) and value.shape[0] == len(self.at):
            flat = value.reshape(len(self.at), -1)
            self.writer.put(name, flat, self.at, columns=self.rank * flat.shape[1], width=[self.ranks * flat.shape[1]])

    def end_of_layers(self, hidden: torch.Tensor) -> None:
        """Remember which row each final hidden state belongs to: logits are computed from some of them, later."""
        if self.at is not None and hidden.shape[0] == len(self.at):
            self.put("final_norm", hidden)
            self.seen.update(zip(row_digests(hidden).tolist(), self.at.tolist(), strict=True))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None, vocab: int) -> None:
        """``out`` [m, V], whole, where this rank has it."""
        if self.start < 0 or out is None or self.rank:
            return
        at = torch.tensor([self.seen.get(digest, -1) for digest in row_digests(hidden).tolist()], dtype=torch.int64)
        if bool((at >= 0).any()):
            self.writer.put("logits", out[:, :vocab], at)


@contextmanager
def _hooks(model: Any, run: _Run, sizes: ModelShape) -> Iterator[None]:
    described = architecture_of(sizes)
    embedding, (norm, *_) = described.first.parameters[0], described.last.parameters
    with ExitStack() as stack:

        def begin(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
            run.begin(given.get("input_ids"), given["positions"])

        # On the whole model: the inner one's class, made for torch.compile, calls past its hooks.
        stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        stream = embedding.tensors[0].point
        _after(stack, _module(model, embedding.vllm), partial(run.put, stream))
        for index, (layer, moe) in enumerate(zip(model.model.layers, moe_layers(sizes), strict=True)):
            here, before = f"layers.{index}.", stream
            for block in described.layer(moe):
                _hook_block(stack, run, block, layer, here, before, sizes)
                stream = here + block.operations[-1].point

        def final(out: Any) -> None:
            if isinstance(out, tuple):
                run.put(stream, out[1])
            run.end_of_layers(_first(out))

        _after(stack, _module(model, norm.vllm), final)

        def logits(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            hidden = kwargs.get("hidden_states", args[1] if len(args) > 1 else None)
            if hidden is not None:
                run.logits(hidden, out, sizes.vocab)

        stack.callback(model.logits_processor.register_forward_hook(logits, with_kwargs=True).remove)
        yield


def _hook_block(stack: ExitStack, run: _Run, block: Block, layer: Any, here: str, stream: str, sizes: ModelShape) -> None:
    """Hooks on the modules of one block; ``here`` stands before its points, ``stream`` is what the layer before gave."""
    operations = {operation.point: operation for operation in block.operations}
    for parameter in block.parameters:
        tensors = parameter.tensors
        if parameter.of_experts or tensors[0].point in block.modules:
            continue
        module, names = _module(layer, parameter.vllm), [here + tensor.point for tensor in tensors]
        if parameter.shard is Shard.COLUMN:
            rows = [SIZES[tensor.axes[0]](sizes) // run.ranks for tensor in tensors]
            _after(stack, module, partial(_split, run, names, rows))
        elif tensors[0].axes == "D":
            _after(stack, module, partial(run.columns, names[0]))
        elif operations[tensors[0].point].op == "norm":
            parent = operations[tensors[0].point].parents[0]
            _after(stack, module, partial(_normed, run, names[0], stream if parent == "stream" else here + parent))
        else:
            _after(stack, module, partial(_put, run, names[0]))
    for point, path in block.vllm_modules.items():
        module = layer.get_submodule(path)
        if operations[point].op == "attention":
            # Queries and keys as attention takes them: the rotary module is one for all layers.
            turned = [here + parent for parent in operations[point].parents if operations[parent].op == "rope"]
            stack.callback(module.register_forward_pre_hook(partial(_turned, run, turned)).remove)
        _after(stack, module, partial(run.columns, here + point))
    for point, path in block.modules.items():
        if operations[point].op == "top_k":
            hook_experts(stack, run, layer.get_submodule(path), here, sizes)
        else:
            _after(stack, layer.get_submodule(path), partial(run.put, here + point))


def _module(root: Any, parameter: str) -> Any:
    return root.get_submodule(parameter.rpartition(".")[0])


def _after(stack: ExitStack, module: Any, work: Callable[[Any], None]) -> None:
    stack.callback(module.register_forward_hook(lambda _m, _a, out: work(out)).remove)


def _put(run: _Run, name: str, out: Any) -> None:
    run.put(name, _first(out))


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _normed(run: _Run, name: str, residual: str, out: Any) -> None:
    """vLLM's norm adds first and returns the sum beside the result; the first layer's has nothing to add."""
    if isinstance(out, tuple):
        run.put(residual, out[1])
    run.put(name, _first(out))


def _split(run: _Run, names: list[str], rows: list[int], out: Any) -> None:
    for name, part in zip(names, _first(out).split(rows, dim=-1), strict=True):
        run.columns(name, part)


def _turned(run: _Run, names: list[str], _module: Any, args: tuple[Any, ...]) -> None:
    for name, part in zip(names, args, strict=False):
        run.columns(name, part)

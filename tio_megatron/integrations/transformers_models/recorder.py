"""Recording a Hugging Face model, eager or not, with hooks: one that is described, or one whose modules have the same names.

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

from tio_megatron.checkpoint import Checkpoint, CheckpointConfig, CheckpointError, require_no_code
from tio_megatron.findings.messages import cut, named
from tio_megatron.models import Block, Parameter, Tensor, architectures
from tio_megatron.models.blocks import HF_LAYER
from tio_megatron.models.points import described
from tio_megatron.traces.scored import in_id_order, keeper, record_head
from tio_megatron.traces.tracer import Tracer
from tio_megatron.traces.writer import TraceWriter


def load_hf(folder: Path, dtype: str = "") -> Any:
    """A model of transformers from an HF folder, in evaluation mode and in ``dtype`` ("" for the checkpoint's own).

    Only safetensors are read, and no code of the folder is run.

    Raises:
        ValueError: another word for ``dtype``, a folder that brings its own code, or one whose tensors are not those of the model; names them.
        OSError: no checkpoint there.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in ("", "bfloat16", "float16", "float32"):
        raise ValueError(f"dtype {dtype!r}: bfloat16, float16 or float32 is needed")
    chosen = getattr(torch, dtype) if dtype else "auto"
    require_no_code(Path(folder))
    _require_tensors(Path(folder))
    with _bar_on_a_terminal():
        try:
            model, told = AutoModelForCausalLM.from_pretrained(
                folder, dtype=chosen, trust_remote_code=False, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
            )
        except RuntimeError as error:
            raise ValueError(f"{folder}: transformers cannot make its model of these tensors ({cut(str(error))})") from error
    wrong = {"missing": told["missing_keys"], "without a place in the model": told["unexpected_keys"], "of another shape": told["mismatched_keys"]}
    problems = [f"{len(found)} tensors {what}: {named(sorted(map(str, found)))}" for what, found in wrong.items() if found]
    if problems:  # transformers fills what is missing with new random numbers
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    return model.eval()


def _require_tensors(folder: Path) -> None:
    """Refuse a folder that lacks a tensor or has too many, by the names in its files: transformers names the experts' tensors only as it fuses them.

    A configuration that our own reader does not cover is left to what transformers tells.

    Raises:
        CheckpointError: names the tensors.
    """
    try:
        CheckpointConfig.from_file(folder / "config.json")
    except CheckpointError:
        return
    Checkpoint(folder).close()


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
        raise ValueError(f"{type(model).__name__} has no model.layers; a causal language model that keeps its decoder layers there is needed")
    largest = max(max(sequence) for sequence in sequences)
    if largest >= config.vocab_size:
        raise ValueError(f"token {largest} is outside the vocabulary of {config.vocab_size}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = {
        "layers": len(layers),
        "moe": _moe_layers(model),
        "tied": bool(config.tie_word_embeddings),
        "hidden": config.hidden_size,
        "head_dim": head_dim,
        "experts": getattr(config, "num_experts", None),
        "top_k": getattr(config, "num_experts_per_tok", None),
    }
    if _architecture(model):
        shape["architecture"] = _architecture(model)
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


def _architecture(model: Any) -> str:
    """The architecture of ``model`` if it is described, else an empty name."""
    name = type(model).__name__
    return name if name in architectures() else ""


def _moe_layers(model: Any) -> list[bool]:
    return [hasattr(layer.mlp, "experts") for layer in model.model.layers]


def _layers(model: Any) -> Iterator[tuple[int, Block]]:
    """Every block of every layer with the layer's number."""
    for index, moe in enumerate(_moe_layers(model)):
        yield from ((index, block) for block in described(_architecture(model), moe).layer(moe))


def hf_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by the names of an HF checkpoint: fused tensors of experts are taken apart, a tied head is left out."""
    fused: dict[str, tuple[str, Parameter]] = {}
    for index, block in _layers(model):
        here = HF_LAYER.format(layer=index)
        fused |= {here + parameter.transformers: (here, parameter) for parameter in block.parameters if parameter.transformers}
    for name, tensor in model.named_parameters():
        if name not in fused:
            yield name, tensor
            continue
        here, parameter = fused[name]
        for expert in range(len(tensor)):
            for held, part in zip(parameter.tensors, tensor[expert].chunk(len(parameter.tensors)), strict=True):
                yield here + held.name.format(expert=expert), part


@contextmanager
def hf_hooks(model: Any, tracer: Tracer) -> Iterator[None]:
    """In this context the model reports its points to ``tracer``."""
    inner = model.model
    with ExitStack() as stack:

        def output(module: torch.nn.Module, name: str) -> None:
            stack.callback(module.register_forward_hook(lambda _m, _i, out: _point(tracer, name, out)).remove)

        def before(module: torch.nn.Module, name: str) -> None:
            stack.callback(module.register_forward_pre_hook(lambda _m, args: _point(tracer, name, args[0])).remove)

        first, last = (getattr(described(_architecture(model), _moe_layers(model)[0]), end) for end in ("first", "last"))
        modules = dict(model.named_modules())
        for tensor in (first.parameters[0].tensors[0], last.parameters[0].tensors[0]):
            output(modules[_module(tensor)], tensor.point)
        if hasattr(inner, "rotary_emb"):
            stack.callback(inner.rotary_emb.register_forward_pre_hook(_positions(tracer), with_kwargs=True).remove)
        for index, block in _layers(model):
            here, layer = f"layers.{index}.", HF_LAYER.format(layer=index)
            for path, point in _outputs(block).items():
                if (module := modules.get(f"{layer}{path}".rstrip("."))) is not None:
                    output(module, here + point)
            for path, point in _inputs(block).items():
                if (module := modules.get(layer + path)) is not None:
                    before(module, here + point)
            if (router := _router(block)) is not None:
                _experts(stack, tracer, modules[layer + _module(router)], modules[layer + block.modules["expert_ids"]], index)
        _rotary(stack, tracer, model)
        yield


def _module(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight")


def _attention(block: Block) -> str:
    """The module of a layer that turns queries, if the block is the attention's."""
    turned = next((operation for operation in block.operations if operation.op == "rope"), None)
    tensor = block.tensor(turned.parents[0]) if turned else None
    return _module(tensor).rpartition(".")[0] if tensor else ""


def _router(block: Block) -> Tensor | None:
    """What the choice of a token's experts is made from, if the block has experts."""
    choice = next((operation for operation in block.operations if operation.op == "top_k"), None)
    return None if choice is None else block.tensor(choice.parents[0])


def _outputs(block: Block) -> dict[str, str]:
    """Modules of a layer whose output is a point; the layer itself has an empty name. A router's output is looked at with its experts."""
    points = {operation.point for operation in block.operations} - block.modules.keys()
    own = [tensor for each in block.parameters if not each.of_experts for tensor in each.tensors if tensor.point in points and tensor != _router(block)]
    found = {_module(tensor): tensor.point for tensor in own}
    found |= {path: point for point, path in block.modules.items() if point != "expert_ids"}
    return found | ({"": block.operations[-1].point} if block.modules else {})


def _inputs(block: Block) -> dict[str, str]:
    """Modules of a layer whose input is a point that no module gives."""
    operations, found = {operation.point: operation for operation in block.operations}, {}
    for tensor in [tensor for each in block.parameters if not each.of_experts for tensor in each.tensors if tensor.point in operations]:
        parent = operations[tensor.point].parents[0]
        if parent != "stream" and block.tensor(parent) is None:
            found[_module(tensor)] = parent
    return found


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


def _rotary(stack: ExitStack, tracer: Tracer, model: Any) -> None:
    """Queries and keys after rotation: the function has no module, so the name that the attention's file looks up is wrapped."""
    modules = [(index, model.model.layers[index].get_submodule(path)) for index, block in _layers(model) if (path := _attention(block))]
    place = sys.modules[type(modules[0][1]).__module__]
    original = getattr(place, "apply_rotary_pos_emb", None)
    if original is None:
        return
    current: list[int] = []
    for index, module in modules:
        stack.callback(module.register_forward_pre_hook(lambda _m, _a, index=index: current.append(index)).remove)

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


def _experts(stack: ExitStack, tracer: Tracer, router: Any, experts: Any, layer: int) -> None:
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
        state["queue"] = list(_runs(ids, rank, str(getattr(experts.config, "_experts_implementation", "eager") or "eager")))
        state["k"], state["calls"] = k, 0
        mode = _Linear(lambda x, y: _seen(tracer, here, state, x, y))
        mode.__enter__()
        state["mode"] = mode

    def leave(*_: Any) -> None:
        mode = state.pop("mode", None)
        if mode is not None:
            mode.__exit__(None, None, None)

    stack.callback(leave)
    for module, hook in ((router, routed), (experts, leave)):
        stack.callback(module.register_forward_hook(hook).remove)
    stack.callback(experts.register_forward_pre_hook(enter, with_kwargs=True).remove)
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

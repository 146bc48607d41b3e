"""What Megatron's experts compute, stock or ours, as rows of tokens: labels travel through the layer's own dispatcher before its rows do.

Stock multiplies a row by its probability before the down projection, so there the points are ``expert_scaled`` and ``expert_scaled_out``; ours multiplies
afterwards, as other engines do (``expert_act``, ``expert_out``). Stock's grouped experts (CUTLASS, Transformer Engine) are not looked into.

Legend: s tokens of a rank, R rows of its experts, K chosen experts, I width of an expert, H hidden.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tio_megatron.integrations.expert_rows import ExpertRows, inside, rows_of


class _Layer:
    """One layer's experts while a pass is under way."""

    def __init__(self, stage: Any, mlp: Any, here: str, ordered: bool) -> None:
        self.stage, self.mlp, self.here, self.ordered = stage, mlp, here, ordered
        self.dispatcher = mlp.token_dispatcher
        experts = mlp.experts
        self.etp, self.etp_rank = experts.tp_group.size(), experts.tp_group.rank()
        self.way = "alltoall" if "alltoall" in type(self.dispatcher).__name__.lower() else "allgather"
        self.out = "expert_out" if ordered else "expert_scaled_out"
        self.local: ExpertRows | None = None
        self.own: ExpertRows | None = None
        self.pending: dict[str, list[torch.Tensor]] = {}
        """Results of stock's experts, one after another: recorded together, since each recording has its price."""

    def spread(self, original: Any, hidden: torch.Tensor, routing: torch.Tensor, probs: torch.Tensor) -> Any:
        """Send labels first: a row of the trace and the token's experts, as a hidden state of integers. The real call resets what they leave behind."""
        self.local = self.own = None
        ids = self._ids(routing)
        if ids is not None:
            labels = torch.cat([self.stage.owned(ids.shape[0]).to(ids.device)[:, None], ids], dim=1)
            labels = labels.view(*hidden.shape[:-1], -1)
            rows, weights = original(labels, routing, probs)
            if self.way == "alltoall":
                self.own = rows_of(rows, self._numbers(routing))
            rows, counts, _ = self.dispatcher.dispatch_postprocess(*self.dispatcher.token_dispatch(rows, weights))
            numbers = torch.as_tensor(self.mlp.local_expert_indices).repeat_interleave(torch.tensor([int(count) for count in counts]))
            self.local = rows_of(rows, numbers)
        return original(hidden, routing, probs)

    def _ids(self, routing: torch.Tensor) -> torch.Tensor | None:
        """[s, K]: from ours as they are, from stock's map [s, E] where every token has K experts."""
        k = self.stage.sizes.top_k
        if routing.dtype != torch.bool:
            return routing
        return None if bool((routing.sum(-1) != k).any()) else routing.nonzero()[:, 1].view(-1, k)

    def _numbers(self, routing: torch.Tensor) -> torch.Tensor:
        """The expert of each row of this rank's tokens: they are sorted by it."""
        return routing.nonzero()[:, 1].sort().values if routing.dtype == torch.bool else routing[routing >= 0].sort().values

    def put(self, part: str, value: torch.Tensor, rows: ExpertRows | None, *, cut: bool = False) -> None:
        """Record rows; ``cut``: this rank has its columns of each."""
        if rows is None or not self.stage.running or len(value) != len(rows.at):
            return
        width = value.shape[-1] * (self.etp if cut else 1)
        first = value.shape[-1] * self.etp_rank if cut else 0
        if cut or self.etp_rank == 0 or rows is self.own:
            rows.put(self.stage.tracer.writer, f"{self.here}{part}", value, first=first, width=width)

    def gate_up(self, value: torch.Tensor, rows: ExpertRows | None) -> None:
        for name, half in zip(("expert_gate", "expert_up"), value.chunk(2, -1), strict=True):
            self.put(name, half, rows, cut=True)

    def flush(self) -> None:
        """Record what stock's experts have gathered; rows lie by expert, as the labels do."""
        for name, parts in self.pending.items():
            whole = torch.cat(parts)
            if name == "gate_up":
                self.gate_up(whole, self.local)
            else:
                self.put(name, whole, self.local, cut=True)
        self.pending.clear()

    def ours(self, what: str, value: torch.Tensor) -> None:
        """What :func:`inside` sees while this layer's experts run."""
        if what == "gate_up":
            self.gate_up(value, self.local)
        elif what == "act":
            self.put("expert_act", value, self.local, cut=True)


class _Products(TorchFunctionMode):
    """Keeps the results of elementwise products made in this context: stock's activation has no module."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.mul, torch.Tensor.__mul__, torch.mul):
            self.found.append(out)
        return out


def hook_experts(stack: ExitStack, stage: Any, mlp: Any, here: str, *, ordered: bool) -> None:
    """Record one layer's experts until ``stack`` closes. Every rank of the layer must call it: labels are exchanged."""
    layer = _Layer(stage, mlp, here, ordered)
    if not ordered and not hasattr(mlp.experts, "local_experts"):
        return
    dispatcher = layer.dispatcher
    spread, combine = dispatcher.dispatch_preprocess, dispatcher.combine_postprocess
    dispatcher.dispatch_preprocess = lambda hidden, routing, probs: (
        layer.spread(spread, hidden, routing, probs) if stage.running else spread(hidden, routing, probs)
    )
    stack.callback(delattr, dispatcher, "dispatch_preprocess")
    if layer.way == "alltoall":

        def collected(rows: torch.Tensor) -> Any:
            layer.put(layer.out, rows, layer.own)
            return combine(rows)

        dispatcher.combine_postprocess = collected
        stack.callback(delattr, dispatcher, "combine_postprocess")
    elif ordered or layer.etp == 1:  # stock's partial rows of several ranks are never put together one by one
        stack.callback(mlp.experts.register_forward_hook(lambda _m, _a, out: layer.put(layer.out, out[0], layer.local)).remove)
    if ordered:
        running = ExitStack()
        stack.callback(running.close)
        stack.callback(mlp.experts.register_forward_pre_hook(lambda *_: running.enter_context(inside(layer.ours)) and None).remove)
        stack.callback(mlp.experts.register_forward_hook(lambda *_: running.close()).remove)
        return
    stack.callback(mlp.experts.register_forward_pre_hook(lambda *_: layer.pending.clear()).remove)
    stack.callback(mlp.experts.register_forward_hook(lambda *_: layer.flush()).remove)
    for expert in mlp.experts.local_experts:
        _stock_expert(stack, layer, expert)


def _stock_expert(stack: ExitStack, layer: _Layer, expert: Any) -> None:
    """Gate and up from the first product, the activation between, what the second product takes."""
    modes: list[_Products] = []

    def first(_module: Any, _args: Any, out: Any) -> None:
        if layer.stage.running and layer.local is not None:
            layer.pending.setdefault("gate_up", []).append(out[0])
            modes.append(_Products())
            modes[-1].__enter__()

    def second(_module: Any, args: Any) -> None:
        if not modes:
            return
        mode = modes.pop()
        mode.__exit__(None, None, None)
        scaled: torch.Tensor = args[0]
        acts = [found for found in mode.found if found.shape == scaled.shape]
        if len(acts) > 1:  # the second is scaled by the probability
            layer.pending.setdefault("expert_act", []).append(acts[0])
        layer.pending.setdefault("expert_scaled", []).append(scaled)

    def leave() -> None:
        while modes:
            modes.pop().__exit__(None, None, None)

    stack.callback(leave)
    stack.callback(expert.linear_fc1.register_forward_hook(first).remove)
    stack.callback(expert.linear_fc2.register_forward_pre_hook(second).remove)

"""A trainer's forward in one process: HF tensors, our kernels, fp32 log-probabilities. Neither vLLM nor Megatron is in it.

Every sequence is one whole pass (no pages, no chunks, no batch): what a trainer does. Shapes: T tokens, H hidden, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract, ReductionTree
from tio_megatron.kernels.attention import attention
from tio_megatron.kernels.combine import combine
from tio_megatron.kernels.embedding import embedding
from tio_megatron.kernels.grouped import grouped_linear
from tio_megatron.kernels.linear import linear
from tio_megatron.kernels.logprob import log_softmax
from tio_megatron.kernels.norm import rms_norm
from tio_megatron.kernels.rope import rope, rope_table
from tio_megatron.kernels.router import route
from tio_megatron.kernels.swiglu import swiglu


class Teacher:
    """One checkpoint, scored whole."""

    def __init__(self, folder: Path | str, contract: Contract) -> None:
        checkpoint = Checkpoint(folder)
        self.config, self.contract = checkpoint.config, contract
        self.weights = dict(checkpoint.tensors())
        shape = self.config.shape
        self.table = rope_table(self.config.max_positions, shape.head_dim, self.config.rope_theta)
        self.leaves = contract.cuts

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] fp32 of one sequence."""
        w, shape = self.weights, self.config.shape
        x = embedding(torch.tensor(list(tokens)), w["model.embed_tokens.weight"], 0)
        for layer in range(shape.layers):
            p = f"model.layers.{layer}."
            x = x + self._attention(rms_norm(x, w[p + "input_layernorm.weight"], self.config.rms_eps), p + "self_attn.")
            y = rms_norm(x, w[p + "post_attention_layernorm.weight"], self.config.rms_eps)
            x = x + (self._experts(y, p + "mlp.") if shape.experts else self._mlp(y, p + "mlp."))
        x = rms_norm(x, w["model.norm.weight"], self.config.rms_eps)
        head = w["model.embed_tokens.weight"] if shape.tied else w["lm_head.weight"]
        return linear(x, head, leaves=1, out_dtype=torch.float32)

    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities [T, V] fp32; row t is the distribution of token t + 1."""
        return log_softmax(self.logits(tokens) / temperature, self.contract.vocab_order(self.config.shape.vocab))

    def _attention(self, x: torch.Tensor, p: str) -> torch.Tensor:
        w, shape, eps = self.weights, self.config.shape, self.config.rms_eps
        positions, ends = torch.arange(len(x)), torch.tensor([0, len(x)], dtype=torch.int32)
        q, k, v = (linear(x, w[f"{p}{n}_proj.weight"], leaves=1).view(len(x), -1, shape.head_dim) for n in "qkv")
        q = rope(rms_norm(q, w[p + "q_norm.weight"], eps), positions, self.table)
        k = rope(rms_norm(k, w[p + "k_norm.weight"], eps), positions, self.table)
        o, _ = attention(q, k, v, cu_q=ends, cu_k=ends, scale=shape.head_dim**-0.5)
        return linear(o.reshape(len(x), -1), w[p + "o_proj.weight"], leaves=self.leaves.attn_row)

    def _mlp(self, x: torch.Tensor, p: str) -> torch.Tensor:
        w = self.weights
        gate_up = torch.cat([linear(x, w[f"{p}{n}_proj.weight"], leaves=1) for n in ("gate", "up")], dim=-1)
        return linear(swiglu(gate_up), w[p + "down_proj.weight"], leaves=self.leaves.mlp_row)

    def _experts(self, x: torch.Tensor, p: str) -> torch.Tensor:
        w, shape = self.weights, self.config.shape
        ids, probs = route(linear(x, w[p + "gate.weight"], leaves=1, out_dtype=torch.float32), shape.top_k, self.config.normalise)
        # Rows in the order of experts; the row of choice (t, j) is what `index` says.
        order = ids.reshape(-1).argsort(stable=True)
        index = order.argsort().view_as(ids)
        counts = torch.bincount(ids.reshape(-1), minlength=shape.experts)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        names = [f"{p}experts.{e}." for e in range(shape.experts)]
        w13 = torch.stack([torch.cat([w[n + "gate_proj.weight"], w[n + "up_proj.weight"]]) for n in names])
        w2 = torch.stack([w[n + "down_proj.weight"] for n in names])
        rows = grouped_linear(swiglu(grouped_linear(x[order // shape.top_k], w13, offsets, leaves=1)), w2, offsets, leaves=self.leaves.expert_row)
        return combine(rows, index, ids, probs, experts=shape.experts, nodes=(ReductionTree(shape.experts).root,))[0].to(x.dtype)

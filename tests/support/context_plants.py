"""Attention in orders that context parallelism usually has, planted in the place of :func:`tio_megatron.layers.attention.attention`."""

import torch

from tio_megatron.kernels import attention as kernel
from tio_megatron.layers.attention import attention


def ring_merge(ranks):
    """Partial softmaxes over each rank's keys, merged in fp32 in the order of a ring that starts at the query's own rank. Forward only.

    With one rank there is one partial softmax: the bytes of the real attention.
    """

    def planted(q, k, v, *, scale, cu_seqlens=None):
        if cu_seqlens is None:
            return torch.stack([sample(*(t[:, b] for t in (q, k, v)), scale, ranks) for b in range(q.shape[1])], 1)
        edges = cu_seqlens.tolist() + [len(q)]
        return torch.cat([sample(*(t[lo:hi] for t in (q, k, v)), scale, ranks) for lo, hi in zip(edges[:-1], edges[1:], strict=True)])

    return planted


def sample(q, k, v, scale, ranks):
    owner = owners(len(q), ranks)
    out = torch.empty_like(q)
    for rank in range(ranks):
        rows = (owner == rank).nonzero().squeeze(1)
        done = q.new_zeros(len(rows), *q.shape[1:], dtype=torch.float32)
        total = done.new_full(done.shape[:2], -torch.inf)
        for step in range(ranks):
            keys = (owner == (rank - step) % ranks).nonzero().squeeze(1)
            seen = [keys[keys <= row] for row in rows]
            some = torch.tensor([i for i, each in enumerate(seen) if len(each)], dtype=torch.int64)
            if not len(some):
                continue
            sizes = torch.tensor([0, *(len(seen[i]) for i in some)]).cumsum(0).to(torch.int32)
            picked = torch.cat([seen[i] for i in some])
            starts = torch.arange(len(some) + 1, dtype=torch.int32)
            part, lse = kernel.attention(q[rows[some]].float(), k[picked].float(), v[picked].float(), cu_q=starts, cu_k=sizes, scale=scale)
            both = torch.logaddexp(total[some], lse)
            old, new = (total[some] - both).exp()[..., None], (lse - both).exp()[..., None]
            done[some], total[some] = done[some] * old + part * new, both
        out[rows] = done.to(q.dtype)
    return out


def owners(length, ranks):
    """The rank of each position of a sample."""
    if ranks == 1:
        return torch.zeros(length, dtype=torch.int64)
    chunk = torch.arange(length) // max(1, length // (2 * ranks))
    return torch.minimum(chunk, 2 * ranks - 1 - chunk)


def gradients_summed_over_ranks(ranks):
    """The real attention, whose gradients of keys and values are added up from what each rank's own queries give."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, scale):
            ctx.save_for_backward(q, k, v)
            ctx.scale = scale
            return attention(q, k, v, scale=scale)

        @staticmethod
        def backward(ctx, dout):
            whole = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            owner = owners(len(dout), ranks)
            with torch.enable_grad():
                out = attention(*whole, scale=ctx.scale)
            parts = [torch.autograd.grad(out, whole, dout * (owner == rank)[:, None, None, None], retain_graph=True) for rank in range(ranks)]
            return *(sum(each[1:], each[0]) for each in zip(*parts, strict=True)), None

    return lambda q, k, v, *, scale, cu_seqlens=None: Planted.apply(q, k, v, scale)

"""Log-probabilities of given tokens from a megatron-core model, in any layout. Feeds the model and cuts its answer; arithmetic is in ``layers``.

Legend: ``n`` tokens of a sequence, ``V`` true vocabulary, ``S`` common padded length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from tio_megatron.collectives import all_gather
from tio_megatron.integrations.megatron.modules.parts import vocab_shard
from tio_megatron.integrations.megatron.versions import release
from tio_megatron.integrations.megatron.weights.pieces import unwrap
from tio_megatron.layers.context import all_tokens, global_rows, own_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.layers.vocab import VocabShard, at_temperature, vocab_logprob, vocab_logprob_rows


@dataclass
class Scores:
    """What :func:`token_logprobs` returns, one entry per sequence.

    ``logprobs[i]`` is ``[n - 1]`` fp32: entry ``t`` is the log-probability of token ``t + 1`` after tokens ``0 .. t``. ``rows[i]`` is
    ``[positions, V]`` fp32: the whole distribution after the asked positions (empty without ``rows``).
    """

    logprobs: list[torch.Tensor] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Batch:
    """One forward pass: the model's input, and where each sequence lies in it. ``padding`` is True where there is none."""

    tokens: torch.Tensor
    targets: torch.Tensor
    """The next token of the same sequence; 0 behind the last."""
    padding: torch.Tensor
    places: list[tuple[int, int, int]]
    """Per sequence: its row, its first column and its number of tokens."""
    packed: PackedSeqParams | None = None

    @property
    def sequences(self) -> Sequences:
        """Which of its tokens are this rank's under context parallelism."""
        starts = None if self.packed is None else self.packed.cu_seqlens_q
        return Sequences(starts, parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())


@torch.no_grad()
def token_logprobs(
    model: Any,
    sequences: Sequence[Sequence[int] | torch.Tensor],
    *,
    temperature: float = 1.0,
    rows: Sequence[Sequence[int]] | None = None,
    packed: bool = False,
    batch: int | None = None,
) -> Scores | None:
    """Score ``sequences``: every rank of the model calls this with the same arguments (ranks that differ in data parallelism with their own).

    Under context parallelism every rank gives whole sequences; they are padded and cut here, and the scores are put together again.

    Args:
        model: a ``GPTModel`` built under ``apply()``, possibly wrapped; this rank's pipeline stage.
        sequences: token ids, of any lengths from 1 on.
        temperature: divides the logits before everything else.
        rows: for each sequence, positions after which the distribution over the whole vocabulary is wanted.
        packed: several sequences in one row without padding between them (thd) instead of one row each.
        batch: sequences in one forward pass; all by default. Changes time and memory, never bytes.

    Returns:
        The scores, on every rank of the last pipeline stage; ``None`` on the other stages.

    Raises:
        ValueError: no sequence, an empty one, a token outside the vocabulary, a position outside its sequence, or a list of model chunks.
    """
    ids = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
    if not ids or any(sequence.dim() != 1 or not len(sequence) for sequence in ids):
        raise ValueError("token_logprobs: give at least one sequence, each of at least one token")
    wanted = [list(positions) for positions in rows] if rows is not None else [[] for _ in ids]
    if len(wanted) != len(ids):
        raise ValueError(f"token_logprobs: rows has {len(wanted)} entries for {len(ids)} sequences")
    for positions, sequence in zip(wanted, ids, strict=True):
        if any(not 0 <= position < len(sequence) for position in positions):
            raise ValueError(f"token_logprobs: positions {positions} are not all inside a sequence of {len(sequence)} tokens")
    inner = unwrap(model)
    config = inner.config
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    context = parallel_state.get_context_parallel_world_size()
    chunks = 2 * context if context > 1 else 1
    slices = context * config.tensor_model_parallel_size if config.sequence_parallel else 1
    device = next(inner.parameters()).device
    batches = list(_batches(ids, batch or len(ids), packed, chunks, math.lcm(chunks, slices), device, alike=pipeline > 1))
    scores = Scores()

    def collect(output: torch.Tensor, item: _Batch) -> None:
        shard = _shard(inner, output)
        group = inner.tio_groups.tp if shard.ranks > 1 else None
        output = at_temperature(output, temperature)
        cut = item.sequences
        logprobs = all_tokens(vocab_logprob(output, own_tokens(item.targets, cut), shard, group=group), cut, inner.tio_groups.cp)
        first = len(scores.logprobs)
        scores.logprobs += [logprobs[row, start : start + length - 1].clone() for row, start, length in item.places]
        if rows is not None:
            asked = wanted[first : first + len(item.places)]
            places = [(row, start + p) for (row, start, _), positions in zip(item.places, asked, strict=True) for p in positions]
            at = torch.tensor(places, dtype=torch.int64, device=device).view(-1, 2)
            scores.rows += _rows(output, at, cut, shard, group, inner.tio_groups.cp).split([len(positions) for positions in asked])

    training = model.training
    model.eval()
    try:
        if pipeline == 1:
            for item in batches:
                collect(_run(model, item), item)
        else:
            _pipeline(model, batches, collect)
    finally:
        model.train(training)
    return scores if parallel_state.is_pipeline_last_stage() else None


def _run(model: Any, item: _Batch) -> torch.Tensor:
    # Rotary positions come from where the tokens lie, not from these ids, which stock asks for all the same.
    tokens, padding = own_tokens(item.tokens, item.sequences), own_tokens(item.padding, item.sequences)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if not release().padding_mask or not unwrap(model).config.num_moe_experts or not item.padding.any():
        return model(tokens, positions, None, packed_seq_params=item.packed)
    # Only a router reads the mask: padding is never sent to an expert. Where it cannot be told, padding costs time and changes no true token.
    return model(tokens, positions, None, packed_seq_params=item.packed, padding_mask=padding)


def _rows(output: torch.Tensor, at: torch.Tensor, cut: Sequences, shard: VocabShard, group: Any, cp_group: Any) -> torch.Tensor:
    """The whole distributions ``[places, V]`` at ``at`` ``[places, 2]`` (row and column of the uncut batch), each from the rank that holds it."""
    if cut.ranks == 1:
        return vocab_logprob_rows(output[at[:, 0], at[:, 1]], shard, group=group)
    length = output.shape[1]
    held = global_rows(cut, length).argsort().to(at.device)[at[:, 1]]
    owner = held // length
    mine = owner == cut.rank
    found = vocab_logprob_rows(output[at[mine, 0], held[mine] % length], shard, group=group)
    sizes = [int((owner == rank).sum()) for rank in range(cut.ranks)]
    return all_gather(found.contiguous(), cp_group, sizes=sizes).index_select(0, owner.argsort(stable=True).argsort())


def _pipeline(model: Any, batches: list[_Batch], collect: Callable[[torch.Tensor, _Batch], None]) -> None:
    """All batches through megatron-core's own forward schedule; ``collect`` runs on the last stage."""

    def step(iterator: Iterator[_Batch], stage: Any) -> tuple[torch.Tensor, Any]:
        item = next(iterator)

        def done(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            collect(output, item)
            return output.new_zeros(())

        return _run(stage, item), done

    first = batches[0].tokens
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=first.shape[1],
        micro_batch_size=first.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )


def _batches(ids: list[torch.Tensor], batch: int, packed: bool, chunks: int, multiple: int, device: torch.device, alike: bool) -> Iterator[_Batch]:
    """Cut the sequences into forward passes whose lengths are multiples of ``multiple``, packed ones each padded to a multiple of ``chunks``.

    Tokens lie on the model's ``device``; where sequences start stays on the host, where attention reads it. ``alike`` gives all the same shape, as a
    pipeline needs.
    """
    groups = [ids[i : i + batch] for i in range(0, len(ids), batch)]
    lengths = [sum(_up(len(one), chunks) for one in group) if packed else max(map(len, group)) for group in groups]
    if alike:
        lengths = [max(lengths)] * len(groups)
    for group, length in zip(groups, lengths, strict=True):
        length = _up(length, multiple)
        count = 1 if packed else (batch if alike else len(group))
        tokens, targets = torch.zeros(2, count, length, dtype=torch.int64)
        padding = torch.ones(count, length, dtype=torch.bool)
        places = []
        start = 0
        for row, sequence in enumerate(group):
            place = (0, start, len(sequence)) if packed else (row, 0, len(sequence))
            tokens[place[0], place[1] : place[1] + place[2]] = sequence
            targets[place[0], place[1] : place[1] + place[2] - 1] = sequence[1:]
            padding[place[0], place[1] : place[1] + place[2]] = False
            places.append(place)
            start += _up(len(sequence), chunks)
        packing = _packing([_up(n, chunks) for _, _, n in places], length) if packed else None
        yield _Batch(tokens.to(device), targets.to(device), padding.to(device), places, packing)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _packing(lengths: list[int], total: int) -> PackedSeqParams:
    """Padding behind the last sequence is a sequence of its own."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(*lengths, total - int(starts[-1]), 1)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest)


def _shard(inner: Any, logits: torch.Tensor) -> VocabShard:
    """The columns of ``logits``: a rank's own, or all of them when the model gathers its output."""
    vocab = inner.output_layer.vocab
    if logits.shape[-1] == inner.vocab_size:
        return VocabShard(inner.tio_setting.contract.vocab_order(vocab), logits.shape[-1])
    return vocab_shard(vocab, logits.shape[-1], inner.tio_groups.tp)

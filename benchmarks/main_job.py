"""The main job on one accelerator: megatron-core under the contract as trainer, our rollout kernels over pages as rollout, round after round.

A round: rank 0 rolls out (batched, prompts in chunks, then one token a step, sampled) and keeps each token's log-probability; all trainer ranks score
the same tokens (that is the logdiff) and take one step of Adam; the new weights go to the rollout. The trainer's ranks are processes that may share
the card, since gloo moves their bytes by way of the host. Beside it, without the contract: stock megatron-core, and a decoder of plain torch that
goes token by token.

The rollout is no engine: :class:`Rollout` is a Qwen3-MoE decoder of the package's layers at TP 1, which is what runs inside vLLM.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import one_card
from tio_megatron.checkpoint import Checkpoint, CheckpointConfig
from tio_megatron.contract import Contract
from tio_megatron.contract.words import TrainerLayout
from tio_megatron.kernels import attention as attention_kernel
from tio_megatron.kernels import rope as rope_kernel
from tio_megatron.kernels.rope import rope_table
from tio_megatron.layers import linear, norm, router, vocab
from tio_megatron.layers.experts_replicated import experts_replicated

LR = 1e-3
CLIP = 1.0


@dataclass(frozen=True)
class Work:
    """What is run.

    Args:
        model: an HF folder.
        device: where the tensors lie: ``cpu`` or ``cuda``.
        family: of the contract.
        rounds: of rollout, scoring and training.
        samples: sequences of a round.
        prompt: tokens of a prompt (the last sequence's is one shorter, so that lengths differ).
        new: tokens sampled behind it.
    """

    model: Path
    device: str
    family: str
    rounds: int = 2
    samples: int = 4
    prompt: int = 24
    new: int = 16

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.new

    def prompts(self, vocabulary: int, number: int) -> list[list[int]]:
        """The prompts of round ``number``."""
        made = torch.Generator("cpu").manual_seed(1000 + number)
        whole = torch.randint(vocabulary, (self.samples, self.prompt), generator=made, device="cpu").tolist()
        return [*whole[:-1], whole[-1][:-1]]


@dataclass
class Round:
    """One round on the first rank: tokens, the log-probabilities of both sides (of all tokens that have a predecessor, one after another), and seconds."""

    sequences: list[list[int]]
    rollout: list[float]
    trainer: list[float]
    loss: float
    norm: float
    seconds: dict[str, float]

    @property
    def logdiff(self) -> tuple[int, int, float]:
        """Tokens compared, those that differ, the largest difference."""
        return compared(self.trainer, self.rollout)


def compared(a: Sequence[float], b: Sequence[float]) -> tuple[int, int, float]:
    """Tokens, those that differ, and the largest difference (infinity where there is a NaN)."""
    gaps = [abs(x - y) if x == x and y == y else float("inf") for x, y in zip(a, b, strict=True)]
    return len(gaps), sum(gap != 0 for gap in gaps), max(gaps)


class Rollout:
    """A Qwen3-MoE decoder at TP 1 over pages, with the weights of an HF table.

    Args:
        config: the checkpoint's configuration.
        contract: the order of every sum.
        device: where it runs.
    """

    def __init__(self, config: CheckpointConfig, contract: Contract, device: str) -> None:
        s = config.shape
        self.contract, self.device, self.eps = contract, device, config.rms_eps
        self.normalise, self.theta = config.normalise, config.rope_theta
        self.shape = one_card.Shape(s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.experts, s.top_k, s.moe_ffn, s.vocab)
        self.tied = s.tied
        self.weights: one_card.Weights = {}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, by HF name."""
        raw = {name: tensor.to(self.device) for name, tensor in tensors}
        s, found = self.shape, {}
        found["embedding"], found["norm"] = raw["model.embed_tokens.weight"], raw["model.norm.weight"]
        found["head"] = found["embedding"] if self.tied else raw["lm_head.weight"]
        for i in range(s.layers):
            layer = f"model.layers.{i}."
            q, k, v = (raw.pop(f"{layer}self_attn.{name}_proj.weight").view(s.kv_heads, -1, s.hidden) for name in "qkv")
            found[f"{i}.qkv"] = torch.cat([q, k, v], 1).flatten(0, 1)
            found[f"{i}.o"] = raw[f"{layer}self_attn.o_proj.weight"]
            found[f"{i}.q_norm"], found[f"{i}.k_norm"] = (raw[f"{layer}self_attn.{name}_norm.weight"] for name in "qk")
            found[f"{i}.norm1"], found[f"{i}.norm2"] = raw[f"{layer}input_layernorm.weight"], raw[f"{layer}post_attention_layernorm.weight"]
            found[f"{i}.gate"] = raw[f"{layer}mlp.gate.weight"]
            gate, up, down = ([raw.pop(f"{layer}mlp.experts.{e}.{name}_proj.weight") for e in range(s.experts)] for name in ("gate", "up", "down"))
            found[f"{i}.w13"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
            found[f"{i}.w2"] = torch.stack(down)
        self.weights = found

    @torch.no_grad()
    def run(self, prompts: Sequence[Sequence[int]], new: int, seed: int) -> tuple[list[list[int]], list[float]]:
        """Sample ``new`` tokens behind each prompt. Returns the sequences, and the log-probability of every token but the first of each, one list."""
        s, device, count = self.shape, self.device, len(prompts)
        each = -(-(max(map(len, prompts)) + new) // one_card.PAGE)
        pages = [torch.zeros(count * each, s.kv_heads, one_card.PAGE, 2 * s.head, dtype=torch.bfloat16, device=device) for _ in range(s.layers)]
        # The pages of all sequences between each other, and backwards.
        blocks = torch.arange(count * each, dtype=torch.int32, device="cpu").flip(0).view(each, count).t().contiguous()
        table = rope_table(each * one_card.PAGE, s.head, self.theta).to(device)
        dice = torch.Generator("cpu").manual_seed(seed)
        sequences = [list(prompt) for prompt in prompts]
        scores: list[list[float]] = [[] for _ in prompts]
        done = [0] * count
        while any(len(sequence) < len(prompt) + new for sequence, prompt in zip(sequences, prompts, strict=True)):
            step = []
            for i, sequence in enumerate(sequences):
                chunk = max(1, len(prompts[i]) // 3) if done[i] < len(prompts[i]) else 1
                hi = min(len(sequence), done[i] + chunk, len(prompts[i]) + new - 1)
                step += [(i, done[i], hi)] if hi > done[i] else []
            rows = self._rows(step, sequences, pages, blocks, table)
            for (i, lo, hi), mine in zip(step, rows, strict=True):
                done[i] = hi
                if hi == len(sequences[i]):
                    sequences[i].append(int(torch.multinomial(mine[-1].exp(), 1, generator=dice)))
                scores[i] += [float(mine[at - lo, sequences[i][at + 1]]) for at in range(lo, hi)]
        return sequences, [score for one in scores for score in one]

    def _rows(self, step: list[tuple[int, int, int]], sequences: list[list[int]], pages: list[Tensor], blocks: Tensor, table: Tensor) -> list[Tensor]:
        """One pass over the tokens ``lo .. hi`` of each sequence of ``step``: all log-probabilities after each, on the host."""
        s, w, device = self.shape, self.weights, self.device
        lengths = [hi - lo for _, lo, hi in step]
        ids = torch.tensor([token for i, lo, hi in step for token in sequences[i][lo:hi]], device=device)
        where = torch.cat([torch.arange(lo, hi, device="cpu") for _, lo, hi in step])
        of = torch.tensor([i for i, _, _ in step], device="cpu").repeat_interleave(torch.tensor(lengths, device="cpu"))
        slots = (blocks[of, where // one_card.PAGE].long() * one_card.PAGE + where % one_card.PAGE).to(device)
        own = blocks[[i for i, _, _ in step]].to(device)
        where = where.to(device)
        starts = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32)
        keys = torch.tensor([hi for _, _, hi in step], dtype=torch.int32, device="cpu")
        shard = vocab.VocabShard(self.contract.vocab_order(s.vocab), s.vocab)
        x = w["embedding"].index_select(0, ids)
        for i in range(s.layers):
            q, k, v = s.heads_of(linear.column_parallel(norm.rms_norm(x, w[f"{i}.norm1"], self.eps), w[f"{i}.qkv"]))
            q = rope_kernel.rope(norm.rms_norm(q, w[f"{i}.q_norm"], self.eps), where, table)
            k = rope_kernel.rope(norm.rms_norm(k, w[f"{i}.k_norm"], self.eps), where, table)
            attention_kernel.write_pages(k, v, pages[i], slots)
            o = attention_kernel.attention_paged(q, pages[i], own, keys, starts, scale=s.head**-0.5)
            x = x + linear.row_parallel(o.flatten(1), w[f"{i}.o"], leaves=self.contract.cuts.attn_row)
            h = norm.rms_norm(x, w[f"{i}.norm2"], self.eps)
            chosen, probs = router.route_tokens(router.router_logits(h, w[f"{i}.gate"]), s.top_k, normalise=self.normalise)
            given = {"experts": s.experts, "leaves": self.contract.cuts.expert_row}
            x = x + experts_replicated(h, chosen, probs, list(w[f"{i}.w13"].unbind()), list(w[f"{i}.w2"].unbind()), **given)
        logits = vocab.vocab_logits(norm.rms_norm(x, w["norm"], self.eps), w["head"], shard)
        return list(vocab.vocab_logprob_rows(logits, shard).cpu().split(lengths))


def job(rank: int, work: Work, layout: str) -> tuple[list[Round], dict[str, str]]:
    """One trainer rank of the default group: all rounds. Returns them and the SHA-256 of each weight afterwards; nothing but on rank 0."""
    from examples.qwen3_moe.trainer import Trainer
    from tio_megatron.integrations.megatron.weights.transfer import export_weights

    contract = Contract(family=work.family)
    with Checkpoint(work.model) as checkpoint:
        config = checkpoint.config
    trainer = Trainer(config, TrainerLayout.parse(layout), contract, longest=work.longest, device=work.device)
    trainer.load(work.model)
    trainer.train_with(lr=LR, clip_grad=CLIP)
    rollout = Rollout(config, contract, work.device) if rank == 0 else None
    rounds: list[Round] = []
    digests: dict[str, str] = {}
    for number in range(work.rounds):
        clock = [time.monotonic()]
        weights = dict(export_weights(trainer.model, config))
        clock.append(time.monotonic())
        told: list[Any] = [None]
        if rollout is not None:
            rollout.load(weights.items())
            told = [rollout.run(work.prompts(config.shape.vocab, number), work.new, seed=number)]
        clock.append(time.monotonic())
        dist.broadcast_object_list(told)
        sequences, sampled = told[0]
        prompts = [len(sequence) - work.new for sequence in sequences]
        scored = trainer.score(sequences, prompts)
        clock.append(time.monotonic())
        # A gain for every other sequence, a loss for the rest: nothing is learnt, everything moves.
        gains = [[0.0] * (p - 1) + [(1.0 if i % 2 else -1.0) / work.new] * work.new for i, p in enumerate(prompts)]
        found = trainer.step(sequences, gains, size=max(1, len(sequences) // 2))
        clock.append(time.monotonic())
        if scored is not None:
            seconds = dict(zip(("weights", "rollout", "scoring", "training"), (b - a for a, b in zip(clock[:-1], clock[1:], strict=True)), strict=True))
            rounds.append(Round(sequences, sampled, scored.logprobs.tolist(), found["loss"], found["grad_norm"], seconds))
    for name, tensor in export_weights(trainer.model, config):
        digests[name] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
    trainer.close()
    return rounds, digests


def stock(rank: int, work: Work, sequences: list[list[int]]) -> tuple[list[float], list[float]]:
    """Without the contract, at TP 1: stock megatron-core's log-probabilities of ``sequences``, and those of plain torch token by token."""
    from examples.qwen3_moe.trainer import Trainer

    with Checkpoint(work.model) as checkpoint:
        config = checkpoint.config
        trainer = Trainer(config, TrainerLayout.parse("tp1"), None, longest=work.longest, device=work.device)
        trainer.load(work.model)
        scored = trainer.score(sequences, [1] * len(sequences))
        plain = Rollout(config, Contract(), work.device)
        plain.load(checkpoint.tensors())
    assert scored is not None
    with torch.no_grad():
        ids = [torch.tensor(sequence, device=work.device) for sequence in sequences]
        alone = [score for one in ids for score in one_card.stock_scores(plain.shape, plain.weights, one, 1).tolist()]
    return scored.logprobs.tolist(), alone

"""Every log-probability that an engine of one rank returns has the bytes of the teacher's single pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.vllm.checkpoints import VOCABULARY
from tests.integrations.vllm.engines import LENGTHS, Engine, prompts
from tio_megatron.checkpoint import row_digests
from tio_megatron.integrations.vllm import rollout_contract
from tio_megatron.kernels.logprob import log_softmax
from tio_megatron.testing import first_mismatch


def test_batch_in_chunks(chunked: Engine) -> None:
    assert chunked.check(chunked.generate(prompts())) == sum(LENGTHS) - len(LENGTHS) + 6 * len(LENGTHS)


def test_one_after_another(chunked: Engine) -> None:
    chunked.check(chunked.generate(prompts(seed=1), single=True))


def test_decoded_tokens_scored_again_as_a_prompt(chunked: Engine) -> None:
    first = chunked.generate(prompts((5, 70), seed=2), prompted=False)
    again = chunked.generate([one.whole for one in first], tokens=1)
    for decoded, prefilled in zip(first, again, strict=True):
        assert prefilled.prompted is not None
        assert first_mismatch(decoded.sampled, prefilled.prompted[-len(decoded.tokens) :]) is None
    chunked.check(again)


def test_prefix_cache_miss_and_hit(chunked: Engine) -> None:
    asked = prompts((150, 300), seed=3)
    miss = chunked.generate(asked, prompted=False)
    hit = chunked.generate(asked, prompted=False)
    longer = chunked.generate([one.whole + [9, 8] for one in miss], prompted=False)
    assert [one.cached for one in miss] == [0, 0] and [one.cached for one in hit] == [128, 256] and longer[1].cached == 256
    for answers in (miss, hit, longer):
        chunked.check(answers)


def test_temperature_with_a_seed_per_request(chunked: Engine) -> None:
    asked = prompts((5, 150, 300), seed=4)
    each = [dict(temperature=0.8, seed=40 + number) for number in range(len(asked))]
    batch, single = chunked.generate(asked, each=each), chunked.generate(asked, each=each, single=True)
    # The choice of tokens is a function of the request alone: chunks that sample and throw away do not advance its generator.
    assert [one.tokens for one in batch] == [one.tokens for one in single]
    # Raw log-probabilities ignore the temperature.
    chunked.check(batch)
    assert batch[1].tokens != chunked.generate([asked[1]], each=[dict(temperature=0.8, seed=1)])[0].tokens


def test_whole_rows_sampled_and_prompted(chunked: Engine) -> None:
    asked = prompts((5, 150), seed=5)
    chunked.rpc("tio_record", prompts=True)
    answers = chunked.generate(asked, prompted=False)
    rows = chunked.rpc("tio_rows")
    chunked.rpc("tio_record", on=False)
    names = sorted({name for name, *_ in rows}, key=int)
    for name, one in zip(names, answers, strict=True):
        found = {position: (token, digest) for request, position, token, digest in rows if request == name}
        assert sorted(found) == list(range(1, len(one.whole)))
        assert [found[position][0] for position in sorted(found)] == one.whole[1:]
        assert [found[position][1] for position in sorted(found)] == row_digests(chunked.teacher().logprobs(one.whole))[:-1]


def test_more_requests_than_pages_are_preempted_and_recomputed(crowded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    stock = Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, request, *args, **kwargs: (preempted.append(1), stock(self, request, *args, **kwargs))[1])
    answers = crowded.generate(prompts((90, 100, 110, 120, 60, 61), seed=6), tokens=30, prompted=False)
    assert preempted
    crowded.check(answers)


def test_whole_prompts_top_8_tied(crowded: Engine) -> None:
    crowded.check(crowded.generate(prompts(seed=7)))


def test_processed_log_probabilities(crowded: Engine) -> None:
    """Temperature divides the logits before the maximum; greedy requests in the same batch are untouched; top-k leaves k terms."""
    each = [dict(temperature=0.7, seed=1), {}, dict(temperature=0.7, top_k=20, seed=2)]
    warm, greedy, cut = crowded.generate(prompts((5, 64, 130), seed=8), each=each)
    crowded.check([warm], temperature=0.7)
    crowded.check([greedy])
    logits = crowded.teacher().logits(cut.whole) / 0.7
    kept = torch.where(logits < logits.topk(20).values[:, -1:], -torch.inf, logits)
    rows = log_softmax(kept, crowded.contract.vocab_order(logits.shape[1]))
    at = torch.arange(len(cut.prompt), len(cut.whole))
    assert first_mismatch(cut.sampled, rows[at - 1, torch.tensor(cut.whole)[at]]) is None


def test_padding_rows_of_the_vocabulary_never_count(chunked: Engine) -> None:
    """vLLM pads 700 rows to 704 here; NaN in the padding stays there."""
    head = chunked.model().lm_head
    whole = head.packed.unpack()
    assert len(whole) > VOCABULARY
    spoiled = whole.clone()
    spoiled[VOCABULARY:] = torch.nan
    head.packed.update_(spoiled)
    chunked.check(chunked.generate(prompts((5, 65), seed=11)))
    head.packed.update_(whole)


def test_dense_fp32_tied(dense: Engine) -> None:
    dense.check(dense.generate(prompts(seed=9)))
    dense.check(dense.generate(prompts((1, 5, 130), seed=10), single=True))


def test_stock_vllm_differs(moe: tuple[Path, Path]) -> None:
    """The negative control: the same cases without us."""
    with Engine.start(moe[0], on="off", max_num_batched_tokens=96) as stock:
        answers = stock.generate(prompts(seed=0))
        assert not any(type(module).__name__.startswith("Tio") for module in stock.model().modules())
        with pytest.raises(AssertionError):
            stock.check(answers)
        same = sum(int((one.sampled == stock.picked(one)).sum()) for one in answers)
        assert same < 6 * len(answers) / 2
        with pytest.raises(ValueError, match="does not answer tio_contract"):
            rollout_contract(stock.llm)

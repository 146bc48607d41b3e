"""Engines of several ranks: the same bytes as the teacher's one process, and so as every other layout.

What each row can see. Two ranks hide the order of a sum over ranks (a + b is b + a): a ring's order shows at TP 4 only, in ``make
test-full``. A rounding per rank shows in bf16; an order of fp32 partial sums (a ring, experts one after another) shows in fp32, while the
bf16 log-probabilities of a model this small may hide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.vllm import checkpoints
from tests.integrations.vllm.engines import LENGTHS, Engine, aborted_push_and_back, prompts
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.integrations.vllm import push_weights, rollout_contract, trainer_side

FULL = pytest.mark.full
ROWS = [
    ("TP 2", "bfloat16", ["rounded"]),
    ("TP 2 EP 2 ETP 1", "float32", ["experts"]),
    pytest.param(("TP 2", "float32", ["experts"]), marks=FULL),
    pytest.param(("TP 2", "bfloat16", ["rounded"], "tied"), marks=FULL),
    pytest.param(("TP 4", "float32", ["ring", "experts"]), marks=FULL),
    pytest.param(("TP 4", "bfloat16", ["rounded"]), marks=FULL),
    pytest.param(("TP 4 EP 4 ETP 1", "float32", ["ring", "experts"]), marks=FULL),
]
"""Layout, type, and the wrong orders that this row must see; tied: embedding and head share their rows, scheduler in a process of its own."""


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: " ".join([*row[:2], *row[3:]]))
def ranks(request: pytest.FixtureRequest, moe: tuple[Path, Path], moe_fp32: tuple[Path, Path], folders: Path) -> Iterator[Engine]:
    """One engine with its workers in processes of their own; it serves all cases of this module."""
    layout, dtype, plants, *tied = request.param
    first, second = moe_fp32 if dtype == "float32" else moe
    if tied:
        first, second = (checkpoints.make(folders / f"moe-tied-{seed}", seed, tied=True) for seed in (7, 8))
    options = dict(dtype=dtype, max_num_batched_tokens=96, enable_prefix_caching=True, distributed_executor_backend="mp")
    options |= dict(tensor_parallel_size=int(layout.split()[1]), worker_extension_cls="tests.integrations.vllm.planted.Planted")
    if "EP" in layout:
        options |= dict(on="environment", enable_expert_parallel=True, worker_extension_cls="tests.integrations.vllm.planted.PlantedExtension")
    with pytest.MonkeyPatch.context() as patch:
        # The ranks take the cores of this machine as they come.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Some rows have the scheduler in a process of its own too, as a server has.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if layout == "TP 2" and not tied else "1")
        with Engine.start(first, **options) as engine:
            assert rollout_contract(engine.llm)["layout"] == layout
            engine.second, engine.plants = second, plants
            yield engine


def test_batch_in_chunks(ranks: Engine) -> None:
    assert ranks.check(ranks.generate(prompts(seed=30))) == sum(LENGTHS) - len(LENGTHS) + 6 * len(LENGTHS)


def test_one_after_another_and_prefix_cache(ranks: Engine) -> None:
    asked = prompts((1, 130), seed=31)
    ranks.check(ranks.generate(asked, single=True))
    first, hit = ranks.generate(asked, prompted=False), ranks.generate(asked, prompted=False)
    assert hit[1].cached == 128
    ranks.check(first)
    ranks.check(hit)


def test_seeds_choose_the_tokens_that_the_teacher_chooses(ranks: Engine) -> None:
    asked = prompts((5, 150), seed=32)
    here = ranks.generate(asked, each=[dict(temperature=0.8, seed=number) for number in (7, 8)])
    ranks.check(here)
    for one, seed in zip(here, (7, 8), strict=True):
        assert one.tokens == ranks.drawn(one.prompt, len(one.tokens), 0.8, seed)


def test_weights_there_and_back_with_whole_digests(ranks: Engine) -> None:
    asked = prompts((70,), seed=33)
    for folder in (ranks.second, ranks.folder):
        push_weights(ranks.llm, Checkpoint(folder).tensors(), ranks.contract, bucket_bytes=1_000_000)
        assert ranks.rpc("tio_digests") == Checkpoint(folder).digests()
        ranks.check(ranks.generate(asked), ranks.teacher(folder), what=folder.name)
    ranks.llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(ranks.second)))
    ranks.check(ranks.generate(asked), ranks.teacher(ranks.second), what="reload")
    ranks.rpc("tio_load", str(ranks.folder / "model.safetensors"))
    ranks.check(ranks.generate(asked), what="load_weights")


def test_other_bytes_are_named_across_processes(ranks: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    stock = trainer_side._save
    monkeypatch.setattr(trainer_side, "_save", lambda bucket, path: stock({key: value + 1 if key == name else value for key, value in bucket.items()}, path))
    with pytest.raises(ValueError, match=name):
        push_weights(ranks.llm, Checkpoint(ranks.folder).tensors(), ranks.contract)
    monkeypatch.undo()
    push_weights(ranks.llm, Checkpoint(ranks.folder).tensors(), ranks.contract)
    ranks.check(ranks.generate(prompts((5,), seed=34)))


def test_an_aborted_push_refuses_requests_and_everything_again_mends_it(ranks: Engine) -> None:
    aborted_push_and_back(ranks, ranks.second)
    aborted_push_and_back(ranks, ranks.folder)


def test_a_method_that_fails_on_every_rank_leaves_them_in_step(ranks: Engine) -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="no_such_file"):
            ranks.rpc("tio_load", "no_such_file")
        assert ranks.rpc("tio_contract")["layout"].startswith("TP")
    ranks.check(ranks.generate(prompts((5,), seed=36)))


def test_planted_wrong_orders_are_seen(ranks: Engine) -> None:
    asked = prompts((150, 65), seed=35)
    for plant in ranks.plants:
        ranks.llm.collective_rpc("tio_plant", args=(plant,))
        ranks.llm.reset_prefix_cache()
        with pytest.raises(AssertionError):
            ranks.check(ranks.generate(asked))
    ranks.llm.collective_rpc("tio_plant", args=(None,))
    ranks.llm.reset_prefix_cache()
    ranks.check(ranks.generate(asked))

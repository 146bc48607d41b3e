"""Workers hear each other at start: the one without the plug-in, the one with another contract, the one whose patch lies under another's."""

import sys
import time
import types

import pytest
import torch.distributed as dist

from tio_megatron.integrations import handshake
from tio_megatron.integrations.patching import Patch, PatchSet, author_of
from tio_megatron.testing import run_ranks


def one(**changed):
    fields = dict(contract="c0", kernels="cpu-1", symbols=["a:b"], problems=[])
    return handshake.record("megatron-core", **(fields | changed))


def told(rank_main, ranks=3):
    """What each rank's :func:`handshake.meet` said: its error, or the number of answers."""

    def work(rank):
        try:
            return len(rank_main(rank))
        except ValueError as error:
            return str(error)

    return run_ranks(ranks, work)


def test_equal_workers_meet():
    assert told(lambda rank: handshake.meet(one(), range(3))) == [3, 3, 3]


def test_a_worker_without_the_plug_in_is_named_by_all_others():
    def main(rank):
        if rank == 1:
            time.sleep(4)  # stock: it knows nothing of us
            return []
        return handshake.meet(one(), range(3), seconds=2)

    first, stock, last = told(main)
    assert stock == 0
    for said in (first, last):
        assert "rank 1: tio_megatron did not load there" in said and "rank 2" not in said and "runtime_env" in said


@pytest.mark.parametrize("field, value", [("contract", "c1"), ("kernels", "cpu-2"), ("vocab_size", 700), ("symbols", ["a:b", "a:c"])])
def test_a_worker_with_something_else_is_named_by_all(field, value):
    for said in told(lambda rank: handshake.meet(one(**({field: value} if rank == 2 else {})), range(3), seconds=30)):
        lines = said.splitlines()[1:]
        assert len(lines) == 1 and lines[0].strip().startswith("rank 2 (process "), said
        assert ("a:c" if field == "symbols" else f"{field} is {value}, elsewhere") in lines[0]


def test_a_problem_of_one_worker_is_told_by_all():
    for said in told(lambda rank: handshake.meet(one(problems=["m:f: replaced"] if rank == 0 else []), range(3)), ranks=3):
        assert "rank 0 (process" in said and "m:f: replaced" in said


def test_workers_that_share_no_sum_are_not_waited_for():
    def main(rank):
        return handshake.meet(one(), (0, 2), seconds=30) if rank != 1 else []

    assert told(main) == [2, 0, 2]


def test_a_contract_applied_again_is_heard_anew():
    """An answer of the time before lies in the store: it is waited over, not accused."""

    def main(rank):
        handshake.meet(one(), range(2))
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        return handshake.meet(one(contract="c1"), range(2), seconds=20)

    assert told(main, ranks=2) == [2, 2]


def test_one_process_alone_has_only_its_own_problems():
    assert handshake.meet(one(), [0])[0]["pid"]
    with pytest.raises(ValueError, match="a:b is gone"):
        handshake.meet(one(problems=["a:b is gone"]), [0])


def test_the_seconds_to_wait(monkeypatch):
    assert handshake.wait_seconds() == handshake.SECONDS
    for text in ("0", "-1", "soon", "inf"):
        monkeypatch.setenv(handshake.VARIABLE, text)
        with pytest.raises(ValueError, match=f"{handshake.VARIABLE}='{text}' is not a number of seconds"):
            handshake.wait_seconds()


def test_two_plug_ins_on_one_symbol(monkeypatch):
    """Below ours it is foreign, above ours it is a problem; both by the author's name."""
    stock, other = types.ModuleType("stock_engine"), types.ModuleType("other_plugin")
    exec("def f(): return 1", vars(stock))
    exec("def f(): return 2\ndef g(): return 3", vars(other))
    monkeypatch.setitem(sys.modules, "stock_engine", stock)
    stock.g = stock.f
    patch = [Patch(f"stock_engine:{name}", build=lambda original: lambda: 4, why="a test") for name in ("f", "g")]
    clean = PatchSet(patch).on()
    assert clean.shared() == {} and clean.problems() == []
    stock.g = other.g
    assert clean.problems() == ["stock_engine:g: replaced by somebody else after tio_megatron (its code is other_plugin's)"]
    stock.g = clean._replaced[1].replacement
    clean.undo()
    stock.f = other.f
    assert PatchSet(patch).on().shared() == {"stock_engine:f": "other_plugin"} and author_of(other.f) == "other_plugin"

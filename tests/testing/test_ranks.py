"""run_ranks: results by rank, the culprit's traceback, no hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tio_megatron.testing import RankError, run_ranks


def _gather(rank, scale):
    parts = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([rank * scale]))
    return torch.cat(parts), torch.get_num_threads()


@pytest.mark.parametrize("start, n", [("fork", 1), ("fork", 3), ("spawn", 2)])
def test_results_by_rank(start, n):
    for parts, threads in run_ranks(n, _gather, 10.0, start=start):
        assert parts.tolist() == [10.0 * r for r in range(n)] and threads == 1


def test_the_first_failure_ends_all_and_shows_its_traceback():
    def fail(rank):
        if rank == 1:
            raise KeyError("the culprit")
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 of 3 failed(.|\n)*the culprit") as caught:
        run_ranks(3, fail)
    assert caught.value.rank == 1


def test_a_rank_that_dies_is_named():
    def die(rank):
        if rank == 0:
            os._exit(7)
        dist.barrier()

    with pytest.raises(RankError, match="rank 0 of 2 failed(.|\n)*exit status 7"):
        run_ranks(2, die)


def test_timeout_shows_where_the_ranks_are():
    def sleep_if_odd(rank):
        if rank == 1:
            time.sleep(60)

    with pytest.raises(TimeoutError, match="not done in 3 s(.|\n)*sleep_if_odd"):
        run_ranks(2, sleep_if_odd, timeout=3)


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(0, _gather)
    with pytest.raises(ValueError, match="fork"):
        run_ranks(1, _gather, start="thread")

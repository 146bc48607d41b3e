"""Pages that hold keys of older weights are refused."""

import pytest
import torch

pytest.importorskip("vllm")

from tio_megatron.integrations.vllm.pages import PageVersions  # noqa: E402
from tio_megatron.integrations.vllm.weights import Ledger  # noqa: E402


def step(pages: PageVersions, slots: list[int], table: list[list[int]], lengths: list[int]) -> None:
    pages.check(torch.tensor(slots), torch.tensor(table, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))


def test_a_cached_prefix_of_older_weights_is_refused() -> None:
    ledger = Ledger()
    pages = PageVersions(ledger, 4)
    step(pages, [8, 9, 10, 11, 12], [[2, 3, 0]], [5])
    step(pages, [13], [[2, 3, 0]], [6])
    ledger.version += 1
    with pytest.raises(ValueError, match="1 pages .* reset_prefix_cache"):
        step(pages, [16, 17], [[2, 4, 0]], [6])


def test_pages_written_again_are_read() -> None:
    ledger = Ledger()
    pages = PageVersions(ledger, 4)
    step(pages, [8, 9, 10, 11], [[2, 3]], [4])
    ledger.version += 1
    step(pages, [8, 9, 10, 11, 12], [[2, 3]], [5])
    step(pages, [13, -1], [[2, 3]], [6])


def test_a_request_that_goes_on_after_an_update_is_refused() -> None:
    ledger = Ledger()
    pages = PageVersions(ledger, 4)
    step(pages, [8, 9], [[2, 3]], [2])
    ledger.version += 1
    with pytest.raises(ValueError, match="reset_running_requests"):
        step(pages, [10], [[2, 3]], [3])

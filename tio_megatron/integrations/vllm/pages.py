"""Keys and values of older weights: a prefix cache that was not reset after a weight update is refused, not read."""

from __future__ import annotations

import torch

from tio_megatron.integrations.vllm.weights import Ledger


class PageVersions:
    """For every page, the version of the weights that wrote its first key.

    Costs nothing until the first weight update. A page is filled in order by one request, so its first key is its oldest.
    """

    def __init__(self, ledger: Ledger, block_size: int) -> None:
        self._ledger = ledger
        self._block_size = block_size
        self._written = torch.zeros(0, dtype=torch.int64)

    def counts(self) -> bool:
        """Whether :meth:`check` has anything to look at: there was a weight update."""
        return self._ledger.version != 0

    def check(self, slots: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor) -> None:
        """Note the pages that this step starts, and refuse the step if it reads older ones.

        Args:
            slots: [T] slot of each token of the step, below 0 for padding.
            block_table: [B, *] pages of each sequence.
            lengths: [B] keys of each sequence, this step's included.

        Raises:
            ValueError: a sequence reads keys of older weights.
        """
        if not self.counts():
            return
        version = self._ledger.version
        started = slots[(slots >= 0) & (slots % self._block_size == 0)] // self._block_size
        pages = -(-lengths.long() // self._block_size)
        read = block_table[torch.arange(block_table.shape[1]) < pages[:, None]].long()
        top = int(max(started.max().item() if started.numel() else 0, read.max().item() if read.numel() else 0)) + 1
        if top > self._written.numel():
            self._written = torch.cat([self._written, self._written.new_zeros(2 * top - self._written.numel())])
        self._written[started] = version
        stale = self._written[read] != version
        if bool(stale.any()):
            raise ValueError(
                f"{int(stale.sum())} pages hold keys and values of older weights: the weights changed without a cache reset; "
                "call reset_prefix_cache() after the update (reset_running_requests=True if requests are unfinished)"
            )

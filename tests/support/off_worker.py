"""A vLLM worker class that on one rank does as a worker without the plug-in: it is there, and says nothing. Named by the test, never by vLLM itself."""

from __future__ import annotations

import time
from typing import Any

from tio_megatron.integrations.vllm.worker import TioWorker


class OffWorker(TioWorker):
    """Rank 1 loads its model without a word to the others."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Where ranks meet."""
        if self.rank == 1:
            time.sleep(60)
            raise RuntimeError("rank 1 was left alone")
        super().load_model(*args, **kwargs)

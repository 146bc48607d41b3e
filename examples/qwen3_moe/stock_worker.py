"""What a worker of stock vLLM is asked for beside vLLM's own methods."""

from __future__ import annotations


class StockWorker:
    """Methods for ``collective_rpc``; give this class as ``worker_extension_cls``."""

    def pack_experts(self) -> None:
        """Stock vLLM on the CPU packs experts when it loads them, but on a reload copies them unpacked over the packed ones: pack them again."""
        for layer in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)

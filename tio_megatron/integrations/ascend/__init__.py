"""What an Ascend NPU needs before its kernels run: torch_npu imported, and the switches that move an order of sums set. No kernels, no models."""

from tio_megatron.integrations.ascend.start import start
from tio_megatron.integrations.ascend.switches import prepare, report, verify

__all__ = ["prepare", "report", "start", "verify"]

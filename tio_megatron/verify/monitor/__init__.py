"""Watches a training run: logdiff of every step to JSONL and TensorBoard, and a bundle to look at when it is too large. Changes no byte."""

from tio_megatron.verify.monitor.bundle import Bundle, not_finite, read_bundle
from tio_megatron.verify.monitor.monitor import LogdiffError, LogdiffWarning, Monitor

__all__ = ["Bundle", "LogdiffError", "LogdiffWarning", "Monitor", "not_finite", "read_bundle"]

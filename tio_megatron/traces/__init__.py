"""Traces: what a model computed at every named point, as digests per token, so that two engines in any layouts can be laid side by side."""

from tio_megatron.traces.digest import row_digests
from tio_megatron.traces.reader import Trace, Unfinished, open_trace
from tio_megatron.traces.tracer import Tracer
from tio_megatron.traces.writer import TraceWriter

__all__ = ["Trace", "TraceWriter", "Tracer", "Unfinished", "open_trace", "row_digests"]

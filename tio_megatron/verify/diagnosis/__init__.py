"""Why two traces differ: the first point that does, the kind of cause, the evidence, and what to change. It computes nothing that anybody trains on."""

from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.walk import diagnose

__all__ = ["Finding", "diagnose"]

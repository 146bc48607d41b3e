"""tio_megatron ("train-inference one"): one order for every sum, so that trainer and rollout agree to the last byte."""

__version__ = "0.1.0"

"""What an NPU's own operators do to an order of sums, asked of the device itself: ``python -m tio_megatron.ascend_selfcheck``. Compares; changes nothing.

*Not run on an NPU.* With ``--twin`` the same questions go to the CPU twins (:mod:`tio_megatron.kernels.npu`), which shows that they are asked right.
"""

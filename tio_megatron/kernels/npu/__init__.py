"""What the kernels of an NPU share: which torch_npu operators are called, what their documents forbid, and CPU twins of their order.

The operators themselves are called in ``kernels/<op>/npu.py``. Nothing here imports torch_npu: its operators are found by name among torch's
(``torch.ops.npu``), where ``import torch_npu`` puts them. ``stand_in`` puts the twins there instead, on a machine without an NPU.

``calls`` finds operators; ``schemas`` is the table of them; ``limits``, ``limits_training``, ``limits_inference``, ``limits_masks``
refuse; ``lengths`` and ``masks`` keep what every layer of a step needs; ``twin`` and ``twin_attention`` do the arithmetic, ``stand_in`` registers them.
"""

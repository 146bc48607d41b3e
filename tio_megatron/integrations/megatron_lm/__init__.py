"""Megatron-LM's own scripts (``pretrain_gpt.py``) under the contract: arguments, defaults, a CPU. Adapts; no arithmetic lives here."""

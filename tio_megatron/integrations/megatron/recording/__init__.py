"""Recording a Megatron model for tio diagnose. Compares nothing."""

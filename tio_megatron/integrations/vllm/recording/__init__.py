"""Recording a vLLM engine for tio diagnose. Compares nothing."""

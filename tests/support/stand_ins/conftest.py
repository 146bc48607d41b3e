"""The stand-ins are imported by child processes alone."""

collect_ignore = ["megatron_lm", "mindspeed", "transformer_engine_only"]

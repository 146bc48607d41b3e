"""The main job: a Qwen3-MoE model trained by Megatron in one layout, sampled by vLLM in another, compared byte for byte."""

"""vllm-ascend 0.23 under the contract: which of its classes give way to ours, which stay beside them, what is refused. No arithmetic lives here.

*Built, not run*: there was no NPU. Every symbol of vllm-ascend and of vLLM 0.23 that is named here is in :mod:`.needs`, and ``make test-vllm-ascend``
checks names and signatures against the sources. Importing :mod:`.needs`, :mod:`.seam` and :mod:`.refusals` imports nothing of either.
"""

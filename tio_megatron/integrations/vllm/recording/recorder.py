"""Recording vLLM: eager, on one rank or tensor-parallel ones, with experts cut or spread, stock or under the contract.

Sequences are prompts whose log-probabilities are asked for, one request at a time, so a token's position says which row of the trace it is, also in
chunked prefill. Every rank's worker records its columns (:mod:`.vllm_worker`), the front end the log-probabilities; the parts are put together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tio_megatron.traces.merge import merge_parts
from tio_megatron.traces.scored import keeper, shape_of
from tio_megatron.traces.writer import TraceWriter

KV_BYTES = 256 << 20
"""Keys and values of one request; left alone vLLM wants most of the machine's memory, and refuses to start where others use it."""

WORKER = "tio_megatron.integrations.vllm.recording.worker.RecordingWorker"
"""For ``worker_extension_cls``."""

_NO_TEMPERATURE = "record: vLLM gives log-probabilities of prompts without a temperature; record with 1, and compare the rollout's own with tio logdiff"


def run_vllm(
    model: Path,
    sequences: Sequence[Sequence[int]],
    folder: Path,
    *,
    layout: str = "tp1",
    dtype: str = "",
    stock: bool = False,
    contract: str | None = None,
    **options: Any,
) -> None:
    """Start an engine on an HF folder and record it. ``options`` as of :func:`record_vllm`.

    Args:
        model: HF folder.
        sequences: token ids.
        folder: of the trace.
        layout: ``tpN`` or ``tpN+ep``.
        dtype: of the weights; the checkpoint's by default.
        stock: the engine as it is.
        contract: as ``TIO_CONTRACT``; that variable's, or the default contract.

    Raises:
        ValueError: a temperature, or a layout that vLLM cannot have.
    """
    if options.get("temperature", 1.0) != 1.0:
        raise ValueError(_NO_TEMPERATURE)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler in this process: it starts in seconds
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # on a CPU vLLM else refuses more ranks than NUMA nodes
    from tio_megatron.checkpoint import CheckpointConfig
    from tio_megatron.contract.words import RolloutLayout
    from tio_megatron.integrations.vllm import engine_options
    from tio_megatron.integrations.vllm.tracing import engine

    chosen = RolloutLayout.parse(layout)
    config = CheckpointConfig.from_file(model / "config.json")
    common: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": dtype or config.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": max(map(len, sequences)) + 1,
        "enable_prefix_caching": False,
        "worker_extension_cls": WORKER,
    }
    common |= {"max_logprobs": -1, "block_size": 64, "kv_cache_memory_bytes": KV_BYTES}
    if stock:
        common |= {"tensor_parallel_size": chosen.tp, "enable_expert_parallel": chosen.expert_parallel}
        common |= {"distributed_executor_backend": "mp"} if chosen.tp > 1 else {}
    else:
        given = contract or os.environ.get("TIO_CONTRACT")
        common = engine_options(given, tp=chosen.tp, expert_parallel=chosen.expert_parallel, **common)
    record_vllm(engine(str(model), **common), config, sequences, folder, checkpoint=model, contract=not stock, **options)


@torch.no_grad()
def record_vllm(
    llm: Any,
    config: Any,
    sequences: Sequence[Sequence[int]],
    folder: Path | str,
    *,
    temperature: float = 1.0,
    full_vocab: bool = False,
    keep: Sequence[str] | bool = False,
    weights: bool = True,
    contract: bool | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Ask ``llm`` for the log-probabilities of ``sequences`` and write a trace.

    Args:
        llm: a ``vllm.LLM`` with ``enforce_eager=True``, ``worker_extension_cls=WORKER`` and without prefix caching.
        config: the :class:`tio_megatron.checkpoint.CheckpointConfig` of its checkpoint.
        sequences: token ids.
        folder: of the trace; the ranks' parts lie below it until they have been joined.
        temperature: must be 1: vLLM gives the log-probabilities of prompts without one.
        full_vocab: record the whole row of log-probabilities too (slow: vLLM returns it as a dictionary).
        keep: names of points and parameters whose tensors are kept ("all" for everything). Stock's experts are looked into only if one of their points is
            named: their fused operator must be run again for it.
        weights: record digests of parameters: under the contract all of them, of stock those that can be told apart in its packed ones.
        contract: whether the plug-in is on, for the report.
        checkpoint: the HF folder that the engine has loaded: parameters that it cannot give back are taken from there, and marked so.

    Raises:
        ValueError: a temperature, or an engine without the recording worker.
    """
    from tio_megatron.integrations.vllm.tracing import prompt_logprobs

    if temperature != 1.0:
        raise ValueError(_NO_TEMPERATURE)
    folder, sizes = Path(folder), config.shape
    shape = shape_of(sizes)
    facts = {
        "temperature": 1.0,
        "training": False,
        "norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "contract": contract,
        "weights": "all" if contract else "some",
        "versions": {"torch": torch.__version__},
    }
    asked: dict[str, Any] = {"folder": str(folder), "shape": shape, "facts": facts, "keep": keep if isinstance(keep, bool) else list(keep), "weights": weights}
    asked |= {"sequences": [list(sequence) for sequence in sequences], "checkpoint": str(checkpoint) if checkpoint else None, "sizes": sizes}
    try:
        ranks = max(llm.collective_rpc("tio_trace_start", args=(asked,)))
    except AttributeError:
        raise ValueError(f"record: the engine's workers cannot record; start it with worker_extension_cls={WORKER!r}") from None
    with TraceWriter(folder / f"rank-{ranks}", sequences, engine="vllm", shape=shape, facts=facts, keep=keeper(keep), rank=ranks) as writer:
        start = 0
        for number, sequence in enumerate(sequences):
            llm.collective_rpc("tio_trace_next", args=(number,))
            table = prompt_logprobs(llm, list(sequence), -1 if full_vocab else 0)
            llm.collective_rpc("tio_trace_next", args=(-1,))
            values = torch.tensor([row[token] for row, token in zip(table[1:], sequence[1:], strict=True)], dtype=torch.float32)
            at = torch.arange(start, start + len(sequence))
            writer.put("logprob", torch.cat([values, torch.zeros(1)]), at)
            if full_vocab and len(sequence) > 1:
                rows = torch.tensor([[row[token] for token in range(sizes.vocab)] for row in table[1:]], dtype=torch.float32)
                writer.put("logprob_rows", rows, at[:-1])
            start += len(sequence)
    llm.collective_rpc("tio_trace_finish")
    merge_parts([folder / f"rank-{rank}" for rank in range(ranks + 1)], folder)

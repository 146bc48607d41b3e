"""A Qwen3-MoE model in vLLM's code with our layers inside, run once without an engine: ``python vllm_model.py MODEL [VLLM]``; prints digests.

Without VLLM it is the installed vLLM and the parts of a CPU. With VLLM, a folder with the Python of vLLM 0.23, it is that one with the parts of an NPU:
vLLM 0.23's experts and our attention in vllm-ascend's frame. The four classes of vllm-ascend stand in (:mod:`vllm_ascend_stand_in`), the kernels are the
CPU's, and packages that vLLM 0.23 imports and this environment lacks are empty. So it shows that our layers fit the older code, and nothing of an NPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LACKING = ("gguf", "compressed_tensors", "xgrammar", "outlines_core", "llguidance", "mistral_common", "opentelemetry")
LENGTHS = (70, 33)
PAGE = 128


def main(folder: str, older: str | None) -> dict[str, Any]:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0", GLOO_SOCKET_IFNAME="lo")
    if older is not None:
        import npu_stub

        npu_stub.ROOTS = LACKING
        sys.path.insert(0, older)
        sys.meta_path.append(npu_stub._Finder())
    import torch
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context

    from tio_megatron.checkpoint import Checkpoint
    from tio_megatron.contract import Contract
    from tio_megatron.integrations.vllm import in_force, parts

    if older is not None:
        parts.chosen = _npu_parts
    config = EngineArgs(model=folder, enforce_eager=True, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=256, block_size=PAGE).create_engine_config()
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from tio_megatron.integrations.vllm import scoped

    in_force.enter(Contract(), None)
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as place:
        init_distributed_environment(1, 0, f"file://{place}/meet", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model = scoped.TioQwen3MoeForCausalLM(vllm_config=config)
        with Checkpoint(folder) as checkpoint:
            model.load_weights(checkpoint.tensors())
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        layers = {name: layer for name, layer in config.compilation_config.static_forward_context.items() if hasattr(layer, "impl")}
        step = _step(config, layers, older is not None)
        for layer in layers.values():
            layer.kv_cache = _cache(layer, older is not None)
        ids = torch.randint(0, model.shape.vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        # vLLM's CPU attention writes its pages apart from reading them; vllm-ascend's does both at once.
        written: dict[str, Any] = {} if older is not None else {"slot_mapping": dict.fromkeys(layers, step.slot_mapping)}
        with set_forward_context(dict.fromkeys(layers, step), config, **written), torch.inference_mode():
            hidden = model(ids, positions)
            logits = model.compute_logits(hidden)
        return {
            "vllm": vllm.__version__,
            "where": str(Path(vllm.__file__).parents[1]),
            "classes": sorted({type(module).__name__ for module in model.modules()} | {type(layer.impl).__name__ for layer in layers.values()}),
            "hidden": _digest(hidden),
            "logits": _digest(logits),
        }


def _npu_parts() -> Any:
    from vllm_ascend_stand_in import install

    install()
    from tio_megatron.integrations.vllm import layers, parts
    from tio_megatron.integrations.vllm.ascend import attention, experts, seam

    return parts.Parts({**layers.REPLACEMENTS, **experts.REPLACEMENTS}, attention.TioAscendAttentionBackend, frozenset(seam.HARMLESS))


def _step(config: Any, layers: dict[str, Any], npu: bool) -> Any:
    """One step's batch: whole prompts, a page each."""
    import torch

    starts, lengths = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    slots = torch.cat([page * PAGE + torch.arange(length) for page, length in zip((2, 1), LENGTHS, strict=True)])
    name, layer = next(iter(layers.items()))
    batch = SimpleNamespace(
        causal=True, num_reqs=2, num_actual_tokens=sum(LENGTHS), max_query_len=max(LENGTHS), max_seq_len=max(LENGTHS), query_start_loc=starts, seq_lens=lengths
    )
    batch.query_start_loc_cpu, batch.seq_lens_cpu, batch.slot_mapping, batch.block_table_tensor = starts, lengths, slots, table
    if npu:
        return layer.attn_backend.get_builder_cls()(SimpleNamespace(block_size=PAGE), [name], config, torch.device("cpu")).build(0, batch)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    return CPUAttentionMetadata(
        num_actual_tokens=batch.num_actual_tokens,
        max_query_len=batch.max_query_len,
        query_start_loc=starts,
        max_seq_len=batch.max_seq_len,
        seq_lens=lengths,
        block_table=table,
        slot_mapping=slots,
        scheduler_metadata=None,
        causal=True,
    )


def _cache(layer: Any, npu: bool) -> Any:
    import torch

    from tio_megatron.integrations.vllm.ascend.pages import joined

    pages, heads, size = 4, layer.num_kv_heads, layer.head_size
    if not npu:
        return torch.zeros(pages, heads, PAGE, 2 * size, dtype=torch.bfloat16)
    bytes_each = pages * PAGE * heads * size * 2
    found = joined(lambda _: {"a": (torch.zeros(bytes_each, dtype=torch.int8), torch.zeros(bytes_each, dtype=torch.int8))})(None)
    return tuple(raw.view(torch.bfloat16).view(pages, PAGE, heads, size) for raw in found["a"])


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.argv = sys.argv[:1]
    print(json.dumps(main(arguments[0], arguments[1] if len(arguments) > 1 else None)))

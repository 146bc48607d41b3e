"""One side of a table, as a process (Megatron: a rank of torchrun): scores given tokens and writes a recording.

python -m tio_megatron.verify.matrix.side '{"engine": "vllm", "words": "tp2+ep", ...}' OUT.jsonl
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Tokens = Sequence[Sequence[int]]
Logprobs = list[list[float]]


def score(engine: str, model: Path, tokens: Tokens, *, words: str, stock: bool, contract: str, temperature: float = 1.0) -> Logprobs | None:
    """Log-probabilities of all tokens but each sequence's first; None on a rank that does not hold them.

    Raises:
        ValueError: a temperature that the engine does not apply to given tokens.
    """
    if engine == "megatron" and not stock:
        return _megatron(model, tokens, words, contract, temperature)
    if temperature != 1.0:
        raise ValueError(f"{engine}{' (stock)' if stock else ''} scores given tokens at temperature 1 alone, {temperature} was asked for: score with megatron")
    if engine == "hf":
        return _hf(model, tokens, words)
    return _megatron(model, tokens, words, None) if engine == "megatron" else _vllm(model, tokens, words, None if stock else contract)


def _hf(model: Path, tokens: Tokens, dtype: str) -> Logprobs:
    import torch

    from tio_megatron.integrations.transformers_models.recorder import load_hf

    built = load_hf(model, dtype)
    found = []
    with torch.no_grad():
        for sequence in tokens:
            ids = torch.tensor([list(sequence)])
            table = built(ids).logits[0].float().log_softmax(-1)
            found.append(table[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def _vllm(model: Path, tokens: Tokens, words: str, contract: str | None) -> Logprobs:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler in this process: it starts in seconds
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # on a CPU vLLM else refuses more ranks than NUMA nodes
    from tio_megatron.checkpoint import CheckpointConfig
    from tio_megatron.contract.words import RolloutLayout
    from tio_megatron.integrations.vllm import engine_options
    from tio_megatron.integrations.vllm.recording.recorder import KV_BYTES
    from tio_megatron.integrations.vllm.tracing import engine, prompt_logprobs

    layout = RolloutLayout.parse(words)
    longest = max(map(len, tokens)) + 1
    options: dict[str, Any] = {"enforce_eager": True, "dtype": CheckpointConfig.from_file(model / "config.json").dtype, "skip_tokenizer_init": True}
    options |= {"max_model_len": longest, "enable_prefix_caching": False, "block_size": 64, "kv_cache_memory_bytes": KV_BYTES}
    if contract is not None:
        options = engine_options(contract, tp=layout.tp, expert_parallel=layout.expert_parallel, **options)
    else:
        options |= {"tensor_parallel_size": layout.tp, "enable_expert_parallel": layout.expert_parallel}
        options |= {"distributed_executor_backend": "mp"} if layout.tp > 1 else {}
    llm = engine(str(model), **options)
    scored = []
    for sequence in tokens:
        rows = prompt_logprobs(llm, list(sequence), 0)
        scored.append([row[token] for row, token in zip(rows[1:], sequence[1:], strict=True)])
    return scored


def _megatron(model: Path, tokens: Tokens, words: str, contract: str | None, temperature: float = 1.0) -> Logprobs | None:
    import torch
    import torch.distributed as dist

    import tio_megatron
    from tio_megatron.checkpoint import Checkpoint
    from tio_megatron.contract import Contract
    from tio_megatron.contract.words import TrainerLayout
    from tio_megatron.integrations.megatron import cpu_device
    from tio_megatron.integrations.megatron.scoring.logprobs import token_logprobs
    from tio_megatron.integrations.megatron.scoring.stock_scoring import stock_logprobs
    from tio_megatron.integrations.megatron.scoring.tracing import parallel
    from tio_megatron.integrations.megatron.weights.from_hf import gpt_model, padded_vocab, transformer_config
    from tio_megatron.integrations.megatron.weights.transfer import load_weights

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    chosen = TrainerLayout.parse(words)
    with contextlib.ExitStack() as stack, Checkpoint(model) as checkpoint:
        if not torch.cuda.is_available():
            stack.enter_context(cpu_device.enabled())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        stack.callback(dist.destroy_process_group)
        stack.enter_context(parallel(chosen.layout))
        config = checkpoint.config
        held = None if contract is None else Contract.from_json(contract)
        if held is not None:
            stack.enter_context(tio_megatron.apply(held, vocab_size=config.shape.vocab))
        fields = {"moe_token_dispatcher_type": chosen.dispatcher} if config.shape.experts else {}
        settings = transformer_config(config, chosen.layout, calculate_per_token_loss=True, **fields)
        built = gpt_model(config, settings, vocab_size=padded_vocab(config, chosen.layout, held), max_positions=max(map(len, tokens))).eval()
        load_weights(built, checkpoint)
        if held is None:
            return stock_logprobs(built, tokens, config.shape.vocab)
        scores = token_logprobs(built, tokens, batch=1, temperature=temperature)
        return None if scores is None else [row.tolist() for row in scores.logprobs]


def main(settings: Mapping[str, Any], out: Path) -> None:
    """Score and write; of ranks that hold the same, the lowest writes."""
    warnings.simplefilter("ignore")
    named = {name: settings[name] for name in ("words", "stock", "contract", "temperature")}
    found = score(settings["engine"], Path(settings["model"]), settings["tokens"], **named)
    if found is None:
        return
    lines = [json.dumps({"tokens": list(ids), "logprobs": logprobs}) for ids, logprobs in zip(settings["tokens"], found, strict=True)]
    from tio_megatron.files.whole import write_whole

    part = out.with_name(f"{out.stem}.rank{os.environ.get('RANK', '0')}.jsonl")
    write_whole(part, "".join(line + "\n" for line in lines).encode())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines take seconds to be taken down, and nothing is left to close

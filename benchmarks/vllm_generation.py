"""vLLM's generation with and without the plug-in: Qwen3-30B-A3B widths, 2 layers, 32 experts, one thread.

The vocabulary is cut to 32768 and the experts to 32 so that two engines fit in memory side by side; everything else has the true sizes.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from benchmarks.alternate import ROOT, Engine, medians, serve

VOCAB, REPEATS = 32768, 3
FOLDER = ROOT / "out" / "bench" / "slice-32-experts"
CASES = {
    # requests, prompt tokens, generated tokens, goal
    "prefill, 4 x 512 tokens": (4, 512, 0, 0.5),
    "decode, batch 1": (1, 64, 24, 0.8),
    "decode, batch 8": (8, 64, 24, 0.8),
}
AGAINST = (
    ("", {}),
    (", stock's oneDNN without bf16 instructions", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
)
"""Name and environment of stock. The second: stock's products as on a processor without bf16 instructions; vLLM's own kernels stay as they are."""


def checkpoint() -> Path:
    """Random weights of the true widths, made once."""
    import torch

    from tio_megatron.checkpoint import CheckpointConfig, tensor_table, write_checkpoint

    contents = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if not (FOLDER / "config.json").exists():
        generator = torch.Generator().manual_seed(1)
        table = tensor_table(CheckpointConfig.from_dict(contents).shape)

        def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.ones(shape).bfloat16() if "norm" in name else (torch.randn(shape, generator=generator) * 0.03).bfloat16()

        write_checkpoint(FOLDER, contents, ((name, weight(name, spec.shape)) for name, spec in table.items()))
    return FOLDER


def child(side: str, folder: str) -> None:
    """One engine: answers how long a case takes."""
    from vllm import LLM, SamplingParams

    from tio_megatron.integrations.vllm import engine_options

    options = dict(model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=2048, seed=0)
    options |= dict(enable_prefix_caching=False, num_gpu_blocks_override=64, max_logprobs=-1)
    llm = LLM(**engine_options(**options)) if side == "ours" else LLM(enforce_eager=True, **options)

    def generate(prompts: list[list[int]], tokens: int, **more: int):
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
        return llm.generate([dict(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False)

    def prompts(requests: int, length: int) -> list[list[int]]:
        source = random.Random(requests)
        return [[source.randrange(3, VOCAB) for _ in range(length)] for _ in range(requests)]

    def seconds(requests: int, length: int, tokens: int) -> float:
        asked = prompts(requests, length)
        start = time.perf_counter()
        generate(asked, tokens)
        return time.perf_counter() - start

    def case(name: str) -> dict:
        requests, length, tokens, _ = CASES[name]
        # What the tokens after the first cost; the first is the prompt's.
        return {"seconds": seconds(requests, length, tokens + 1) - seconds(requests, length, 1) if tokens else seconds(requests, length, 1)}

    def scores(answer) -> list[float]:
        return [row[token].logprob for row, token in zip(answer.outputs[0].logprobs, answer.outputs[0].token_ids, strict=True)]

    def bytes_equal() -> bool:
        """A batch, each request alone, and the answer scored again as a prompt agree to the last bit."""
        asked = prompts(3, 130)
        batch = generate(asked, 4, logprobs=0)
        alone = [generate([prompt], 4, logprobs=0)[0] for prompt in asked]
        whole = [prompt + list(answer.outputs[0].token_ids) for prompt, answer in zip(asked, batch, strict=True)]
        again = [
            [row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)][-4:]
            for answer, tokens in zip(generate(whole, 1, prompt_logprobs=0), whole, strict=True)
        ]
        return [scores(answer) for answer in batch] == [scores(answer) for answer in alone] == again

    serve(case, {"bytes_equal": bytes_equal() if side == "ours" else None})


def rows() -> list[dict]:
    """Time of our generation over stock's."""
    folder, logs = str(checkpoint()), ROOT / "out" / "bench" / "logs"
    single = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    single |= {"TORCHDYNAMO_DISABLE": "1", "TIO_CONTRACT": ""}
    found = []
    with Engine("vllm ours", "benchmarks.vllm_generation", ["ours", folder], logs, single) as ours:
        equal = ours.ask()["bytes_equal"]
        for against, environment in AGAINST:
            with Engine(f"vllm stock{against}", "benchmarks.vllm_generation", ["stock", folder], logs, single | environment) as stock:
                stock.ask()
                for name, (_, _, _, goal) in CASES.items():
                    times = medians({"ours": ours, "stock": stock}, name, REPEATS)
                    ratio = times["ours"] / times["stock"] if equal else None
                    note = f"{times['ours']:.2f} s against {times['stock']:.2f} s{'' if environment else _instructions()}"
                    row = {"name": f"vLLM {name}{against}", "ratio": ratio, "goal": goal, "met": ratio is not None and ratio <= goal, "note": note}
                    found.append(row)
    return found


def _instructions() -> str:
    """Stock's bf16 products use these where they exist: twice and more the terms of an fp32 multiply-add, which is what the contract asks for."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    found = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    return f"; stock uses this CPU's {found[0]}" if found else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", nargs="?", choices=("ours", "stock"))
    parser.add_argument("folder", nargs="?")
    options = parser.parse_args()
    if options.side:
        child(options.side, options.folder)
    else:
        for row in rows():
            print(row)

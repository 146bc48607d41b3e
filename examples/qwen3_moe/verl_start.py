"""What `launch/qwen3_moe_verl.sh` gives to verl: a small random model with a tokenizer, the tasks as parquet, and their grade as verl's reward function.

python -m examples.qwen3_moe.verl_start FOLDER --task sort --prompts 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.qwen3_moe import corpus, makers, tasks

END = "<|im_end|>"
"""verl takes a Qwen tokenizer for one that has this token, so it is the one that ends a text here."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """verl's reward function (``reward.custom_reward_function``): nine tenths for the share of places that are right, one tenth for the share
    of characters that a task's words are made of, so that answers of a model that knows nothing differ too.

    >>> round(compute_score("sort", " a b d<|im_end|>", " a b c"), 6), compute_score("sort", "x!", " a b c")
    (0.7, 0.0)
    """
    response = solution_str.replace(END, "")
    known = sum(character in " 0123456789" + tasks.LETTERS for character in response)
    return 0.9 * tasks.grade(tasks.Task("", ground_truth), response) + 0.1 * known / max(1, len(response))


def dense_config(layers: int) -> dict[str, Any]:
    """The tiny model without experts."""
    experts = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
    kept = {name: value for name, value in makers.tiny_config(layers).items() if name not in experts | {"output_router_logits", "router_aux_loss_coef"}}
    return kept | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def write(folder: Path, task: str, prompts: int, *, seed: int = 1, layers: int = 2, dense: bool = False) -> None:
    """Write ``model/`` and ``train.parquet`` below ``folder``."""
    import pandas

    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = dense_config(layers) if dense else makers.tiny_config(layers)
    makers.make_random(model, config, seed)
    tokenizer = corpus.train_tokenizer(corpus.corpus(), int(config["vocab_size"]))
    (model / "tokenizer.json").write_text(tokenizer.to_str().replace(corpus.END, END))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "model_max_length": 4096, "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [
        {
            "data_source": task,
            "prompt": [{"role": "user", "content": asked.prompt}],
            "reward_model": {"style": "rule", "ground_truth": asked.answer},
            "extra_info": {"index": number},
        }
        for number, asked in enumerate(tasks.make(task, seed, 0, prompts))
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="verl_start", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=sorted(tasks.TASKS), default="sort")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dense", action="store_true", help="no experts")
    options = parser.parse_args(argv)
    write(options.folder, options.task, options.prompts, layers=options.layers, dense=options.dense)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

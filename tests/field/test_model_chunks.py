"""A list of model chunks (virtual pipeline stages) is refused in one line by whatever takes a model."""

import tempfile
from pathlib import Path

from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron.resume.optimizer_state import export_state
from tio_megatron.integrations.megatron.resume.train_state import load_training, save_training
from tio_megatron.integrations.megatron.scoring.logprobs import token_logprobs
from tio_megatron.integrations.megatron.weights.transfer import export_weights, load_weights
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, tiny_weights


def said(rank):
    """What each function says of a list with the chunk of this rank twice, and of a list with it alone."""
    weights = tiny_weights(MOE | {"num_hidden_layers": 1})
    with tempfile.TemporaryDirectory() as folder:
        run = Training(Recipe(weights, steps=1, samples=2), parse("tp1"), Contract())
        saved = run.save(Path(folder) / "whole")
        calls = {
            "export_weights": lambda chunks: list(export_weights(chunks, run.config)),
            "load_weights": lambda chunks: load_weights(chunks, weights),
            "save_training": lambda chunks: save_training(Path(folder) / "chunks", chunks, run.optimizer, run.schedule, run.config, step=1),
            "load_training": lambda chunks: load_training(saved, chunks, run.optimizer, run.schedule, run.config),
            "export_state": lambda chunks: list(export_state(chunks, run.optimizer, run.config, "param")),
            "token_logprobs": lambda chunks: token_logprobs(chunks, [[1, 2, 3]]),
        }
        found = {}
        for name, call in calls.items():
            for count in (1, 2):
                try:
                    call([run.model] * count)
                    found[name, count] = "no error"
                except Exception as error:
                    found[name, count] = f"{type(error).__name__}: {error}"
        assert not (Path(folder) / "chunks").exists()
        run.close()
    return found


def test_each_function_names_virtual_pipeline_stages():
    (found,) = run_ranks(1, said, timeout=300)
    for (name, count), line in found.items():
        words = f"the model is a list with {count} model chunks: virtual pipeline stages are not supported"
        assert words in line and "\n" not in line and not line.startswith(("AttributeError", "TypeError")), (name, line)

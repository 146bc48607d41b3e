"""The stock runs that stand beside ours are stock's: their first gradient norm is the same number in every layout, but for the order of sums."""

import tempfile
from pathlib import Path

from examples.qwen3_moe.matrix_train import CONTROL, MODEL
from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import write_tiny


def norm(recipe, cut, contract=None):
    def main(rank):
        training = Training(recipe, cut, contract)
        found = training.step()[1]
        training.close()
        return found

    return run_ranks(cut.layout.ranks, main, timeout=300)[0]


def test_the_controls_differ_by_their_sums_alone():
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(write_tiny(Path(folder) / "model", MODEL, torch_dtype="float32"), steps=1)
        ours = norm(recipe, parse("tp1"), Contract(grain=32))
        for cut in (*CONTROL, parse("tp2+ep1+etp2", grouped=False)):
            # Stock averages losses over micro-batches; 16 samples of near lengths make that a difference of a tenth of a percent.
            assert abs(norm(recipe, cut) / ours - 1) < 2e-3, cut

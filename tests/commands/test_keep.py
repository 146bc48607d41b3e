"""``tio record --keep``: a word that names nothing is refused before the run."""

import pytest

from examples.qwen3_moe import makers
from tio_megatron.commands.record import require_known


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keep") / "model"
    makers.make_random(folder, makers.tiny_config(1), 1)
    return folder


@pytest.mark.parametrize("word", ["all", "attn", "layers.0.o_proj", "layers.17.expert_out", "logits", "model.layers.0.mlp.gate.weight", "lm_head.weight"])
def test_words_that_name_something(model, word):
    require_known([word], model)


@pytest.mark.parametrize("word", ["nonsense_point", "layers.0.oproj", "expert-out"])
def test_words_that_name_nothing(model, word):
    with pytest.raises(ValueError, match=f"--keep {word}: no point and no parameter"):
        require_known(["all", word], model)

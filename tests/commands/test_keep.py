"""``tio record --keep``: a word that names nothing is refused before the run."""

import pytest

from examples.qwen3_moe import makers
from tio_megatron.commands.record import require_known


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keep") / "model"
    makers.make_random(folder, makers.tiny_config(1), 1)
    return folder


@pytest.mark.parametrize("word", ["all", "attn", "layers.0.o_proj", "layers.0.expert_out", "logits", "model.layers.0.mlp.gate.weight", "lm_head.weight"])
def test_words_that_name_something(model, word):
    require_known([word], model)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("nonsense_point", "attn or expert_out"),
        ("layers.0.oproj", "layers.0.o_proj"),
        ("expert-out", "expert_out"),
        ("layers.17.expert_out", "layers 0 to 0; layers.0.expert_out would"),
        ("layers.1.attn", "layers 0 to 0; layers.0.attn would"),
        ("model.layers.3.mlp.gate.weight", "model.layers.0.mlp.gate.weight would"),
        ("layers.0.act", "layers.0.expert_act"),  # dense layers have it, this model has none
    ],
)
def test_words_that_name_nothing_and_the_nearest(model, word, near):
    with pytest.raises(ValueError, match=f"--keep {word}: ") as refused:
        require_known(["all", word], model)
    assert near in str(refused.value)

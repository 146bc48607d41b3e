"""The file of a table: what it may say, and what is refused before anything is started."""

import pytest

from tio_megatron.testing.qwen3 import MOE, write_tiny
from tio_megatron.verify.matrix.table import Side, Table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("matrix")
    write_tiny(made / "model", MOE)
    (made / "tokens.jsonl").write_text('{"tokens": [1, 2, 3]}\n[4, 5]\n')
    return made


def table(folder, text):
    (folder / "t.yaml").write_text(text)
    return Table.from_file(folder / "t.yaml")


def test_a_table(folder):
    found = table(folder, "model: model\ntokens: tokens.jsonl\ntrainers: [megatron tp2+ep2, megatron tp2+ep2]\nrollouts: [vllm tp4, stock vllm, hf float32]\n")
    assert [str(side) for side in found.sides] == ["megatron tp2+ep2", "vllm tp4", "stock vllm tp1", "hf float32"]
    assert found.tokens == [[1, 2, 3], [4, 5]] and found.contract.cuts.attn_row == 4, "the smallest that serves the layouts under the contract"
    assert [side.ranks for side in found.sides] == [2, 1, 1, 1]


def test_random_tokens_are_the_same_each_time(folder):
    text = "model: model\ntokens: {random: 3, longest: 9, seed: 7}\ntrainers: [megatron]\nrollouts: [hf]\n"
    assert table(folder, text).tokens == table(folder, text).tokens != table(folder, text.replace("7", "8")).tokens


@pytest.mark.parametrize(
    "text, says",
    [
        ("model: model\nrollouts: [hf]\n", "missing trainers"),
        ("model: model\ntrainers: [hf]\nrollouts: [hf]\nseed: 1\n", "unknown seed"),
        ("model: model\ntrainers: hf\nrollouts: [hf]\n", "trainers must be a list of words"),
        ("model: model\ntrainers: [sglang tp1]\nrollouts: [hf]\n", "'sglang' is none of megatron, vllm, hf"),
        ("model: model\ntrainers: [megatron tp3]\nrollouts: [hf]\n", "no cuts serve TP 3"),
        ("model: model\ntrainers: [stock megatron pp2]\nrollouts: [hf]\n", "scored without pipeline stages"),
        ("model: model\ntrainers: [megatron]\nrollouts: [hf float16]\n", "'float16' is none of bfloat16, float32"),
        ("model: model\ntrainers: [megatron]\nrollouts: [vllm tp2+ep4]\n", "ep is tp"),
        ("model: none\ntrainers: [megatron]\nrollouts: [hf]\n", "no such file"),
        ("model: model\ntokens: gone.jsonl\ntrainers: [megatron]\nrollouts: [hf]\n", "no such file"),
        ("model: model\ntokens: {random: 0}\ntrainers: [megatron]\nrollouts: [hf]\n", "tokens must be a file"),
        ("model: model\ntokens: {random: 1, longest: 9999}\ntrainers: [megatron]\nrollouts: [hf]\n", "must have 2 to 512 tokens"),
        ("- model\n", "expected a mapping"),
        ("model: [\n", "cannot be read as YAML"),
        ("model: !!python/object/apply:os.getcwd []\n", "cannot be read as YAML"),
        ("model: model\ntrainers: [megatron tp2]\nrollouts: [hf]\ncontract: {cuts: {attn_row: 1}}\n", "does not fit the contract"),
    ],
)
def test_what_cannot_be_is_said(folder, text, says):
    with pytest.raises(ValueError) as refused:
        table(folder, text)
    assert says in str(refused.value)


def test_sides_in_words():
    assert str(Side.parse("  stock   megatron tp2 ep2 ".strip())) == "stock megatron tp2+ep2"
    assert Side.parse("vllm").words == "tp1"

"""One reader for every way of naming a contract."""

import json

import pytest

from tio_megatron.contract import Contract, Cuts
from tio_megatron.contract.environment import from_environment, read

FOUR = Contract(cuts=Cuts.uniform(4))


@pytest.mark.parametrize("value", ["", "0", "  "])
def test_off(value: str) -> None:
    assert from_environment({"TIO_CONTRACT": value}) is None


@pytest.mark.parametrize("value", ["1", "default"])
def test_default(value: str) -> None:
    setting = from_environment({"TIO_CONTRACT": value})
    assert setting is not None and setting.contract == Contract()


def test_json_path_mapping_and_contract_name_the_same(tmp_path) -> None:
    path = tmp_path / "contract.json"
    path.write_text(FOUR.to_json())
    for value in (FOUR, FOUR.to_dict(), FOUR.to_json(), str(path), path):
        assert read(value).contract == FOUR


def test_fields_left_out_keep_their_defaults() -> None:
    assert read({"cuts": {"attn_row": 4}}).contract == Contract(cuts=Cuts(attn_row=4))


def test_vocab_size_travels_beside_the_contract() -> None:
    setting = read(json.dumps({"vocab_size": 700, "grain": 256}))
    assert (setting.vocab_size, setting.contract.grain) == (700, 256)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nowhere.json", "nowhere.json"),
        ('{"cuts": {"row": 4}}', "unknown cut row"),
        ('{"cuts": {"attn_row": 3}}', "power of two"),
        ('{"vocab_size": "many"}', "vocab_size"),
        ("{not json", "not JSON"),
    ],
)
def test_refused_with_the_variable_named(value: str, words: str) -> None:
    with pytest.raises(ValueError, match="TIO_CONTRACT") as caught:
        from_environment({"TIO_CONTRACT": value})
    assert words in str(caught.value)

"""``tio rollouts``: what it prints, its exit status, and one line for what is wrong."""

import json

import pytest
from rollout_batches import ABOUT, batch
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.rollouts import Store


def tio(*arguments):
    """(exit status, output) of ``tio rollouts``."""
    done = CliRunner().invoke(app, ["rollouts", *map(str, arguments)])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def store(tmp_path):
    made = Store.create(tmp_path / "store")
    for seed in range(2):
        made.append(batch(seed))
    return made


def test_show_and_verify(store):
    status, said = tio("show", store.folder)
    assert status == 0 and said.strip().endswith(f"2 batches, 10 rollouts, head {store.head[:16]}")
    answer = json.loads(tio("show", store.folder, "--json")[1])
    assert [row["weights"] for row in answer["batches"]] == [ABOUT.weights] * 2 and answer["head"] == store.head
    assert tio("verify", store.folder, "--head", store.head[:16])[0] == 0
    (store.folder / "00000001.safetensors").unlink()
    status, said = tio("verify", store.folder, "--head", store.head[:16] if store.batches == 0 else "0" * 15 + "1")
    assert status == 2 and len(said.strip().splitlines()) == 1 and "gone or changed" in said


def test_sample_is_the_same_again_and_is_a_recording(store, tmp_path):
    out = tmp_path / "drawn.jsonl"
    status, said = tio("sample", store.folder, "--count", 4, "--seed", 3, "--once", "--out", out)
    places = store.sample(4, 3, replace=False).places.tolist()
    assert status == 0 and said.split() == [str(place) for place in places]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [one.tokens.tolist() for one in store.gather(places)]
    by_reward = json.loads(tio("sample", store.folder, "--count", 4, "--seed", 3, "--by", "reward", "--json")[1])
    assert by_reward["places"] != places and len(by_reward["probabilities"]) == 4
    assert tio("sample", store.folder, "--count", 11, "--seed", 3, "--once")[0] == 2
    assert "uniform or reward" in tio("sample", store.folder, "--count", 1, "--seed", 3, "--by", "luck")[1]


def test_import_reads_everything_before_it_writes(tmp_path):
    good = {"prompt_ids": [1], "response_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0], "score": 1, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(good) + "\n")
    status, said = tio("import", tmp_path, tmp_path / "store", "--weights", "abc")
    assert status == 0 and said.strip() == "1 batch, 1 rollout imported; the store has 1 and 1"
    assert Store.open(tmp_path / "store").batch(0).about.weights == "abc"
    (tmp_path / "other.py").write_text("x = 1")
    status, said = tio("import", tmp_path, tmp_path / "store", "--tokenizer", tmp_path / "other.py")
    assert status == 2 and "other.py: no tokenizer.json" in said.replace("\n", "") and "Traceback" not in said
    (tmp_path / "2.jsonl").write_text("{")
    status, said = tio("import", tmp_path, tmp_path / "store")
    assert status == 2 and "2.jsonl, line 1" in said and Store.open(tmp_path / "store").batches == 1


def test_what_is_not_there(tmp_path):
    for arguments in (("show", tmp_path), ("verify", tmp_path), ("sample", tmp_path, "--count", 1, "--seed", 1), ("replay", tmp_path, tmp_path)):
        status, said = tio(*arguments)
        assert status == 2 and len(said.strip().splitlines()) == 1 and "no store of rollouts" in said
    for name in ("show", "verify", "import", "sample", "replay"):
        assert "Example: tio rollouts" in " ".join(tio(name, "--help")[1].split())

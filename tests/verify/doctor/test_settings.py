"""Layouts read from what people have: words, arguments, scripts, YAML of Megatron-LM and verl."""

import json

import pytest

from tio_megatron.verify.doctor import settings

MEGATRON = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size=2 --context-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
)
MEGATRON += " --sequence-parallel --moe-token-dispatcher-type alltoall"
VERL = """
trainer: {nnodes: 2, n_gpus_per_node: 8}
actor_rollout_ref:
  actor: {megatron: {tensor_model_parallel_size: 4, expert_model_parallel_size: 4, expert_tensor_parallel_size: 1, sequence_parallel: true,
    override_transformer_config: {moe_token_dispatcher_type: alltoall}}}
  ref: {megatron: {tensor_model_parallel_size: 2}}
  rollout: {tensor_model_parallel_size: 2, temperature: 1.0}
"""


def test_words():
    assert str(settings.trainer("tp2+ep2").layout) == "TP 2 EP 2 ETP 1 SP"
    assert str(settings.rollout("tp2+ep").layout) == "TP 2 EP 2"


def test_megatron_arguments_in_a_string_or_a_file(tmp_path):
    words = tmp_path / "train it.args"
    words.write_text("torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py " + MEGATRON.replace(" --", "\n  --"))
    assert str(settings.trainer(MEGATRON).layout) == "TP 4 EP 8 ETP 1 SP PP 2 CP 2"
    assert str(settings.trainer(str(words)).layout) == "TP 4 EP 8 ETP 1 SP PP 2 CP 2 DP 2"
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun pretrain_gpt.py {MEGATRON}")
    with pytest.raises(ValueError, match="a script is not read; tio doctor --run -- bash .*train.sh"):
        settings.trainer(str(script))


def test_megatrons_defaults_are_megatrons():
    found = settings.trainer("--tensor-model-parallel-size 2 --expert-model-parallel-size 2").layout
    assert (found.layout.expert_tp, found.layout.sp, found.dispatcher) == (2, False, "allgather")


def test_yaml_and_json(tmp_path):
    tree = {"model_parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "world_size": 4}
    (tmp_path / "a.json").write_text(json.dumps(tree))
    (tmp_path / "a.yaml").write_text("model-parallel:\n  tensor-model-parallel-size: 2\n  sequence-parallel: true\nworld-size: 4\n")
    for name in ("a.json", "a.yaml"):
        assert str(settings.trainer(str(tmp_path / name)).layout) == "TP 2 SP DP 2 allgather"


def test_a_verl_file_holds_both_sides(tmp_path):
    (tmp_path / "v.yaml").write_text(VERL)
    assert str(settings.trainer(str(tmp_path / "v.yaml")).layout) == "TP 4 EP 4 ETP 1 SP DP 4"
    assert str(settings.rollout(str(tmp_path / "v.yaml")).layout) == "TP 2"


@pytest.mark.parametrize(
    "words, layout", [("-tp 4 --enable-expert-parallel", "TP 4 EP 4"), ("--tensor-parallel-size=2", "TP 2"), ("--no-enable-expert-parallel -tp 2", "TP 2")]
)
def test_vllm_arguments(words, layout):
    assert str(settings.rollout(words).layout) == layout


@pytest.mark.parametrize(
    "source, said",
    [
        ("--tensor-model-parallel-size $TP", "a variable that is not set here; write its number"),
        ("--tensor-model-parallel-size 2.5", "must be a whole number of at least 1"),
        ("--tensor-model-parallel-size 0", "must be a whole number of at least 1"),
        ("--tensor-model-parallel-size true", "must be a whole number of at least 1"),
        ("--lr 0.1", "is it a trainer's configuration?"),
        ("--tensor-model-parallel-size 3 --world-size 8", "8 ranks do not divide by tp 3 times pp 1 times cp 1"),
        ("--tensor-model-parallel-size '2", "cannot be split into arguments"),
        ("gone.yaml", "gone.yaml: no such file"),
        ("tp2+xp3", "'xp3' is none of tpN"),
    ],
)
def test_what_cannot_be_read_is_said(source, said):
    with pytest.raises(ValueError) as refused:
        settings.trainer(source)
    assert said in str(refused.value)


def test_files_that_are_no_configuration(tmp_path):
    for name, content, said in (
        ("two.yaml", b"a: {tensor_model_parallel_size: 2}\nb: {tensor_model_parallel_size: 4}\n", "which one holds?"),
        ("list.yaml", b"- 1\n", "expected a mapping"),
        ("bad.json", b"{", "cannot be read"),
        ("raw.args", b"\xff\xfe--x", "cannot be read as text"),
        ("tagged.yaml", b"!!python/object/apply:os.system ['echo ran']\n", "cannot be read"),
        ("deep.json", b"[" * 100000, "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError) as refused:
            settings.trainer(str(tmp_path / name))
        assert said in str(refused.value), name
    (tmp_path / "big.yaml").write_bytes(b"#" * (settings.MOST_BYTES + 1))
    with pytest.raises(ValueError, match="a configuration has at most"):
        settings.trainer(str(tmp_path / "big.yaml"))

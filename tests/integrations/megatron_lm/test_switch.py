"""What switches the contract on in a script, and what goes into modules that come later."""

import argparse
import doctest
import importlib
import sys
from types import SimpleNamespace

import pytest

import tio_megatron as tio
from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.megatron_lm import defaults, options, start, yaml_files
from tio_megatron.integrations.megatron_lm.options import Options
from tio_megatron.integrations.patching import MovedSymbolError, Patch, PatchSet


@pytest.mark.parametrize("module", [options, start])
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_the_command_line_goes_before_the_variables():
    both = {"TIO_CONTRACT": '{"cuts": {"attn_row": 4}}', "TIO_MEGATRON": "1"}
    assert start.chosen(Options(), environ=both).contract.cuts.attn_row == 4
    assert start.chosen(Options(contract='{"cuts": {"attn_row": 2}}'), environ=both).contract.cuts.attn_row == 2
    assert start.chosen(Options(contract="0"), environ=both) is None
    assert start.chosen(Options(), environ=both | {"TIO_CONTRACT": "0"}) is None, "an explicit 0 is stock"
    assert start.chosen(Options(), environ={}, wanted=True).contract == Contract()
    assert start.chosen(Options(vocab_size=700), environ={"TIO_CONTRACT": "1"}).vocab_size == 700


def test_what_cannot_be_read_is_named():
    with pytest.raises(ValueError, match="TIO_MEGATRON='yes': 1 switches tio_megatron on"):
        start.chosen(Options(), environ={"TIO_MEGATRON": "yes"})
    with pytest.raises(ValueError, match="--tio-contract no.json: contract: 'no.json' is neither"):
        start.chosen(Options(contract="no.json"), environ={})
    with pytest.raises(ValueError, match="true vocabulary is given twice: 700 in the contract, --tio-vocab-size 800"):
        start.chosen(Options(vocab_size=800), environ={"TIO_CONTRACT": '{"vocab_size": 700}'})


@pytest.mark.parametrize("value", ["-4", "0", "x", "1.5"])
def test_a_vocabulary_that_cannot_be(value, capsys):
    with pytest.raises(SystemExit):
        options.read_options(["--tio-vocab-size", value])
    assert f"argument --tio-vocab-size: '{value}' is not a positive whole number" in capsys.readouterr().err


def test_defaults_change_and_what_is_said_stays():
    parser = argparse.ArgumentParser()
    for one in defaults.IMPLIED:
        parser.add_argument(f"--{one.option}", default="stock")
    defaults.imply(parser)
    args = parser.parse_args(["--transformer_impl", "transformer_engine"])
    assert args.transformer_impl == "transformer_engine" and args.calculate_per_token_loss is True
    assert defaults.implied(args) == [one.flag for one in defaults.IMPLIED[1:]]
    with pytest.raises(ValueError, match="have no transformer_impl, .*supports Megatron-LM core_v0.16.1"):
        defaults.imply(argparse.ArgumentParser())


@pytest.mark.parametrize("option", [rule.option for rule in defaults.SCRIPT_RULES])
def test_script_options_are_refused_by_name(option):
    defaults.refuse(SimpleNamespace())
    with pytest.raises(ValueError, match=rf"this run cannot obey.*\n  {option}=True: .*; False or None would work"):
        defaults.refuse(SimpleNamespace(**{option: True}))


def parser_of_a_script():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--num-query-groups", type=int, default=1)
    parser.add_argument("--group-query-attention", action="store_true")
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--no-persist-layer-norm", action="store_true")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    parser.add_argument("--transformer-impl", default="local")
    return parser


def test_a_file_is_read_as_arguments():
    found = SimpleNamespace(
        yaml_cfg="f.yaml",
        language_model=SimpleNamespace(num_layers=2, num_moe_experts=8, num_query_groups=4, activation_func="swiglu", window_size=None),
        model_parallel=SimpleNamespace(bf16=True, timers=None, persist_layer_norm=False, cpu_offloading=False),
        lr="1e-3",  # as YAML 1.1 reads it: no point, no number
        apply_rope_fusion=False,
        data_path=["1", "a"],
    )
    parser = parser_of_a_script()
    words = yaml_files.arguments(yaml_files.plain(found), parser, {"cpu_offloading": False})
    said = "--num-layers=2 --num-experts=8 --group-query-attention --num-query-groups=4 --swiglu --bf16 --no-persist-layer-norm --lr=1e-3 --no-rope-fusion"
    assert words == [*said.split(), "--data-path", "1", "a"]
    assert parser.parse_args([*words, "--lr", "2"]).lr == 2.0, "the command line goes before the file"


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("lr_", 1.0, "lr_=1.0: neither an argument nor a field of TransformerConfig"),
        ("cpu_offloading", True, "cpu_offloading=True: a field of TransformerConfig that no argument sets"),
        ("activation_func", "relu", "activation_func='relu': 'swiglu' or 'squaredrelu' or 'gelu' would work"),
        ("apply_rope_fusion", True, "apply_rope_fusion=True: no argument says so; False, the default, would work"),
        ("bf16", "yes", "bf16='yes': a switch; true or false would work"),
        ("tio_contract", "1", "tio_contract='1': read before any file; --tio-contract on the command line would work"),
    ],
)
def test_what_no_argument_says_is_named(name, value, says):
    parser = parser_of_a_script()
    parser.set_defaults(apply_rope_fusion=False)  # as the contract implies
    with pytest.raises(ValueError) as caught:
        yaml_files.arguments({name: value, "num_layers": 2}, parser, {"cpu_offloading": False}, "f.yaml")
    assert str(caught.value).startswith(f"f.yaml cannot be read as arguments of this script:\n  {says}")


def test_a_name_that_stands_twice():
    found = SimpleNamespace(language_model=SimpleNamespace(lr=1.0), lr=2.0)
    with pytest.raises(ValueError, match=r"lr is 1.0 and 2.0 in one file; once would work"):
        yaml_files.plain(found)


def test_the_vocabulary_can_be_learned_once():
    with tio.apply():
        state.learn_vocab_size(700)
        assert state.session().vocab_size == 700
        tio.apply()
        assert state.session().vocab_size == 700, "applying the same again is harmless"
        with pytest.raises(ValueError, match="vocabulary is 700 already, not 800"):
            state.learn_vocab_size(800)
    assert state.session() is None and not state.learned()


@pytest.fixture
def later(tmp_path, monkeypatch):
    (tmp_path / "comes_later.py").write_text("def answer():\n    return 1\n\nasked = answer()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("comes_later", None)


def patch(name="answer", value=2):
    return Patch(f"comes_later:{name}", lambda original: lambda: value, why="tested", supported="comes_later 1")


def test_a_patch_waits_for_its_module(later):
    first, second = PatchSet([patch()], on_import=True).on(), PatchSet([patch("asked", 3)], on_import=True).on()
    assert first.waits_for == ("comes_later",) and not first.targets and "comes_later" not in sys.modules
    module = importlib.import_module("comes_later")
    assert module.answer() == 2 and module.asked() == 3
    assert module.__spec__.loader is module.__loader__ and type(module.__loader__).__module__ == "_frozen_importlib_external"
    assert first.targets == ("comes_later:answer",) and not first.waits_for and not first.problems()
    module.answer = None
    assert first.problems() == ["comes_later:answer: replaced by somebody else after tio_megatron"]
    with pytest.raises(RuntimeError, match="replaced by somebody else"):
        first.undo()
    second.undo()
    assert module.asked == 1


def test_nothing_waits_after_undo(later):
    before = list(sys.meta_path)
    late = PatchSet([patch()], on_import=True).on()
    late.undo()
    late.undo()
    assert sys.meta_path == before and importlib.import_module("comes_later").answer() == 1


def test_a_module_that_is_there_is_patched_at_once(later):
    module = importlib.import_module("comes_later")
    late = PatchSet([patch()], on_import=True).on()
    assert module.answer() == 2
    late.undo()
    assert module.answer() == 1


def test_a_symbol_that_moved_ends_the_import(later):
    late = PatchSet([patch("gone")], on_import=True).on()
    try:
        with pytest.raises(MovedSymbolError, match="comes_later:gone is not there .*supports comes_later 1"):
            importlib.import_module("comes_later")
    finally:
        late.undo()
    assert "comes_later" not in sys.modules


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "names with values would work; found None"),
        ("[1, 2]", "names with values would work"),
        ("3: 4", "names with values would work"),
        ("language_model: 3", "language_model: names with values would work; found 3"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("seed: [", "cannot be read"),
    ],
)
def test_a_yaml_file_that_holds_no_settings_is_named(tmp_path, text, says):
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"--yaml-cfg {file}") as caught:
        yaml_files.check_text(str(file))
    assert says in str(caught.value)
    file.write_text("model_parallel: {bf16: true}\nlanguage_model:\nseed: 1")
    yaml_files.check_text(str(file))

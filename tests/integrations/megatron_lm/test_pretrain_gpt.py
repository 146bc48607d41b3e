"""``pretrain_gpt.py`` under the contract: against a stand-in of Megatron-LM's scripts and, with MEGATRON_LM=DIR, against the sources.

The stand-in takes the same arguments and makes the same ``TransformerConfig`` of them; the rest of it is written for these tests. ``make
test-megatron-lm`` sets MEGATRON_LM. Without it the tests of the real sources are skipped: nothing of Megatron-LM is in CI.
"""

import os
from pathlib import Path

import megatron_lm_runs as runs
import pytest

from tio_megatron.testing import assert_same_bytes

SOURCES = os.environ.get("MEGATRON_LM", "")
real = pytest.mark.skipif(not SOURCES, reason="MEGATRON_LM is not set: make test-megatron-lm MEGATRON_LM=DIR, with a checkout of Megatron-LM core_v0.16.1")


class Runs:
    """One Megatron-LM, and what came out of each layout, run once."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self._found: dict[tuple[str, str], tuple] = {}

    def base(self) -> Path:
        """The checkpoint that every layout starts from: pipeline stages draw random weights of their own."""
        if not (self.out / "base").exists():
            runs.trained(self.folder, self.out / "base", "TP 1", iters=1)
        return self.out / "base"

    def trained(self, layout: str, kind: str = "tio") -> tuple:
        if (layout, kind) not in self._found:
            more = runs.STOCK if kind == "stock" else ["--moe-grouped-gemm"]
            name = f"{kind} {layout}".replace(" ", "-")
            self._found[layout, kind] = runs.trained(self.folder, self.out / name, layout, *more, load=self.base())
        return self._found[layout, kind]


@pytest.fixture(scope="module")
def which(request, tmp_path_factory):
    if request.param == "stand-in":
        return Runs(runs.STAND_IN, tmp_path_factory.mktemp("stand-in"))
    return Runs(runs.linked(Path(SOURCES), tmp_path_factory.mktemp("sources")), tmp_path_factory.mktemp("real"))


def both(*layouts, full=()):
    """One parameter for each Megatron-LM and layout; those of ``full`` only in the full run, and with the sources."""
    return [
        *(pytest.param("stand-in", layout, marks=[pytest.mark.full] if layout in full else []) for layout in layouts),
        *(pytest.param("sources", layout, marks=[real]) for layout in layouts),
    ]


@pytest.mark.parametrize("which, layout", both("TP 2", "TP 2 EP 2", "EP 2 DP 2", "PP 2", full=("TP 2", "EP 2 DP 2", "PP 2")), indirect=["which"])
def test_the_same_weights_in_every_layout(which, layout):
    expected, steps = which.trained("TP 1")
    assert len(steps) == 6 if which.folder != runs.STAND_IN else len(steps) == 3, steps
    weights, theirs = which.trained(layout)
    assert_same_bytes(weights, expected, f"weights after three steps, {layout}")
    assert theirs == steps


@pytest.mark.parametrize("which", ["stand-in", pytest.param("sources", marks=[real])], indirect=True)
def test_the_printed_command_starts_every_layout_from_the_same_random_weights(which, tmp_path):
    """As it stands in docs/megatron-lm.md, and without its layout: no checkpoint to start from, and the bytes of one rank."""
    said, layout = runs.printed(), runs.LAYOUTS["TP 2 EP 2"]
    assert said[: len(layout)] == layout
    weights, steps = runs.trained(which.folder, tmp_path / "two", "TP 2 EP 2", said=said)
    expected, theirs = runs.trained(which.folder, tmp_path / "one", "TP 1", said=said[len(layout) :])
    assert_same_bytes(weights, expected, "three steps from random weights")
    assert steps and steps == theirs
    _, seeded = runs.trained(which.folder, tmp_path / "other", "TP 1", "--seed", "8", said=said[len(layout) :], iters=1)
    assert seeded[0] != steps[0], "control: other random weights have another first step"


@pytest.mark.parametrize("which", ["stand-in", pytest.param("sources", marks=[real])], indirect=True)
def test_control_the_stock_packages_differ(which):
    weights, _ = which.trained("TP 2", "stock")
    expected, _ = which.trained("TP 1", "stock")
    with pytest.raises(AssertionError):
        assert_same_bytes(weights, expected)


@pytest.mark.parametrize("which", ["stand-in", pytest.param("sources", marks=[real])], indirect=True)
def test_a_yaml_file_trains_to_the_bytes_of_the_arguments(which, tmp_path):
    """Its layout is the file's too; an argument beside it goes before it, and shows that the comparison sees one."""
    file = tmp_path / "qwen3_moe.yaml"
    file.write_text(runs.YAML % {"tp": 2, "sp": "true", "ep": 2})
    expected, steps = which.trained("TP 1")
    weights, theirs = runs.trained(which.folder, tmp_path / "out", "TP 2 EP 2", load=which.base(), yaml_cfg=file)
    assert_same_bytes(weights, expected, "weights after three steps, by a file")
    assert theirs == steps
    file.write_text(runs.YAML % {"tp": 1, "sp": "false", "ep": 1})
    weights, _ = runs.trained(which.folder, tmp_path / "other", "TP 1", "--weight-decay", "0.5", load=which.base(), yaml_cfg=file)
    with pytest.raises(AssertionError):
        assert_same_bytes(weights, expected)


@pytest.mark.parametrize("which", [pytest.param("sources", marks=[real])], indirect=True)
def test_without_us_a_yaml_file_cannot_start(which, tmp_path):
    """Why a file is read as arguments: when this fails, Megatron-LM's own way works again."""
    asked = "enable_msc ckpt_convert_format use_checkpoint_args async_save data_path inprocess_restart enable_ft_package".split()
    file = tmp_path / "qwen3_moe.yaml"
    file.write_text(runs.YAML % {"tp": 1, "sp": "false", "ep": 1} + "".join(f"{name}: null\n" for name in asked))
    text = runs.run(which.folder, "TP 1", "--tio-contract", "0", yaml_cfg=file)
    assert "has no attribute 'account_for_embedding_in_pipeline_split'" in text, text[-2000:]


@pytest.mark.parametrize("which", ["stand-in", pytest.param("sources", marks=[real])], indirect=True)
def test_help_lists_our_arguments(which):
    text = runs.run(which.folder, "TP 1", "--help")
    assert text.endswith("status 0"), text[-2000:]
    assert "tio_megatron:\n" in text and all(f"--tio-{name}" in text for name in ("contract", "vocab-size", "device"))
    assert "--num-experts" in text, "the script's own are there too"


@pytest.mark.parametrize("which", ["stand-in", pytest.param("sources", marks=[real])], indirect=True)
def test_what_cannot_be_is_named_at_start(which):
    text = runs.run(which.folder, "TP 1", "--train-iters", "1", "--use-legacy-models", "--transformer-impl", "transformer_engine")
    assert not text.endswith("status 0"), text[-3000:]
    assert "ValueError: this run cannot obey the contract with these options:\n  use_legacy_models=True: the legacy model is not" in text
    assert "\n  transformer_impl='transformer_engine': Transformer Engine is not installed; 'local' (or nothing) would work" in text


@pytest.mark.parametrize("which", ["stand-in", pytest.param("sources", marks=[real])], indirect=True)
def test_one_import_line_does_the_same(which, tmp_path):
    """The script with ``import tio_megatron.auto`` as its first line, started as ever."""
    script = tmp_path / "with_one_line.py"
    script.write_text("import tio_megatron.auto\n" + (which.folder / "pretrain_gpt.py").read_text())
    more = ["--train-iters", "1", "--save", str(tmp_path / "out"), "--save-interval", "1"]
    text = runs.run(which.folder, "TP 1", *more, script=script, starter=False, variables={"TIO_MEGATRON": "1"})
    assert text.endswith("status 0"), text[-3000:]
    assert "tio_megatron: contract " in text and "tio_megatron: 1000 rows of the vocabulary count" in text
    assert_same_bytes(runs.saved(tmp_path / "out"), runs.saved(which.base()), "the first step")

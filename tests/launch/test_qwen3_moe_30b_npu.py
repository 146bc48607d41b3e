"""The recipe for NPUs: what can be known of it without one. Its layouts fit the contract, its command names what they are, and it refuses by name."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples.qwen3_moe import npu_recipe
from examples.qwen3_moe.npu_recipe import RECIPES, Recipe
from tio_megatron.contract.environment import read
from tio_megatron.contract.words import RolloutLayout, TrainerLayout

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ["bash", str(ROOT / "launch" / "qwen3_moe_30b_npu.sh")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    return subprocess.run([*SCRIPT, *arguments], cwd="/", env=environment, capture_output=True, text=True, timeout=120)


def test_the_check_holds_all_layouts_against_the_contract_and_prints_what_would_run() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(";")[0] for line in lines if not line.startswith("  ")][:2] == [
        "tp4pp2cp2ep8: trainer TP 4 EP 8 ETP 1 SP PP 2 CP 2, rollout TP 4, 16 NPUs, 2 machines of 8",
        "tp2ep8: trainer TP 2 EP 8 ETP 1 SP DP 4, rollout TP 4 EP 4, 8 NPUs, 1 machine of 8",
    ]
    assert lines.count("  fits: every product is cut on leaves, on both sides") == 2
    assert lines[-1].startswith("not run on an NPU")


def test_a_reader_that_leaves_early_changes_no_exit_status() -> None:
    """``--check | head``: the pipe's other end is closed before the first line."""
    for arguments, status in ((["--check"], 0), (["--check", "--npus", "0"], 2)):
        reader, writer = os.pipe()
        os.close(reader)
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
        done = subprocess.run([*SCRIPT, *arguments], cwd="/", env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
        os.close(writer)
        assert done.returncode == status and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr, done.stderr


def test_both_sides_read_one_contract() -> None:
    for recipe in RECIPES.values():
        setting = read(npu_recipe.environment(recipe)["TIO_CONTRACT"])
        assert setting.contract == recipe.contract and setting.vocab_size == 151936
        assert setting.contract.family == "npu-910b" and setting.contract.kv_block == 512
    assert RECIPES["tp2ep8"].contract.cuts.expert_row == 1  # experts whole on both sides: torch_npu's grouped product
    assert RECIPES["tp4pp2cp2ep8"].contract.cuts.expert_row == 4  # the rollout cuts experts by 4


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_says_what_the_layout_is(name: str) -> None:
    recipe = RECIPES[name]
    given = dict(word.split("=", 1) for word in npu_recipe.command(recipe, "/m", "/d", 8, ["trainer.total_epochs=2"])[3:])
    layout, side = recipe.trainer.layout, "actor_rollout_ref.actor.megatron"
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    assert [given[f"{side}.{n}_parallel_size"] for n in names] == [str(n) for n in (layout.tp, layout.pp, layout.cp, layout.ep, layout.expert_tp)]
    assert given["actor_rollout_ref.rollout.tensor_model_parallel_size"] == "4"
    assert int(given["trainer.nnodes"]) * int(given["trainer.n_gpus_per_node"]) == recipe.trainer.ranks
    assert given["trainer.total_epochs"] == "2" and given["trainer.device"] == "npu"
    assert given[f"{side}.override_transformer_config.recompute_granularity"] == "full" and given[f"{side}.param_offload"] == "True"


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_has_the_lines_that_verl_needs_on_every_device(name: str) -> None:
    """The table of docs/verl.md; a page of an NPU is 128 keys."""
    table = (ROOT / "docs" / "verl.md").read_text().split("| override | why |")[1].split("\n\n")[0]
    needed = re.findall(r"^\| `(\S+=\S+)` \|", table, re.MULTILINE)
    assert len(needed) == 5
    words = npu_recipe.command(RECIPES[name], "/m", "/d", 8)
    assert {line.replace("block_size=64", "block_size=128") for line in needed} <= set(words)


def test_what_is_printed_can_be_given_to_a_shell() -> None:
    line = next(line for line in run("--check", "--layout", "tp2ep8").stdout.splitlines() if "TIO_CONTRACT" in line)
    words = shlex.split(line)
    assert words[0] == "export" and json.loads(words[1].removeprefix("TIO_CONTRACT="))["family"] == "npu-910b"


def test_layouts_that_cannot_hold_are_named() -> None:
    wide = Recipe(TrainerLayout.of(tp=8, ep=8, etp=1), RolloutLayout(4), "")
    assert any("tp 8 is above the 4 key/value heads, which training refuses" in problem for problem in wide.problems())
    odd = Recipe(TrainerLayout.of(tp=2, ep=3, etp=1), RolloutLayout(4), "")
    assert any("128 experts do not divide by ep 3" in problem for problem in odd.problems())
    assert any("6 NPUs do not divide into engines of 4" in problem for problem in odd.problems())


def test_without_the_packages_a_run_is_refused_by_name() -> None:
    done = run("--model", "/nowhere")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("qwen3_moe_30b_npu: not installed here: torch_npu 2.13.0 and CANN")
    assert "verl 0.9.1" in done.stderr and "--check needs none of them" in done.stderr


def test_bad_input_is_one_line_and_status_2() -> None:
    done = run("--check", "--npus", "0")
    assert done.returncode == 2 and done.stderr == "qwen3_moe_30b_npu: --npus must be at least 1, got 0\n"
    assert run("--layout", "tp3").returncode == 2


@pytest.mark.parametrize("check", [["--check"], ["--model", "/nowhere"]])
@pytest.mark.parametrize(
    ("npus", "layout", "why"),
    [
        ("6", "tp2ep8", "a machine of 6 NPUs: 8 NPUs are no whole number of such machines; 4, 8 or more than 8 works"),
        ("12", "tp4pp2cp2ep8", "a machine of 12 NPUs: 16 NPUs are no whole number of such machines; 4, 8, 16 or more than 16 works"),
        ("2", "tp2ep8", "a machine of 2 NPUs: an engine of 4 does not lie whole in it; 4, 8 or more than 8 works"),
    ],
)
def test_machines_that_the_layout_does_not_fill_are_refused(check: list[str], npus: str, layout: str, why: str) -> None:
    done = run(*check, "--npus", npus, "--layout", layout)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"qwen3_moe_30b_npu: --npus {npus}, --layout {layout}: {why}\n")


@pytest.mark.parametrize(("npus", "machines", "each"), [(4, 2, 4), (8, 1, 8), (9, 1, 8), (16, 1, 8)])
def test_machines_that_it_fills_hold_all_ranks(npus: int, machines: int, each: int) -> None:
    words = npu_recipe.command(RECIPES["tp2ep8"], "/m", "/d", npus)
    assert f"trainer.nnodes={machines}" in words and f"trainer.n_gpus_per_node={each}" in words
    assert f"8 NPUs, {machines} machine{'s' if machines > 1 else ''} of {each};" in npu_recipe.told("tp2ep8", RECIPES["tp2ep8"], "/m", "/d", npus)


def test_words_for_verl_are_in_the_command_that_is_printed() -> None:
    done = run("--check", "--layout", "tp2ep8", "--", "trainer.total_epochs=2", "+data.name='a b'")
    assert done.returncode == 0 and shlex.split(done.stdout.splitlines()[-2])[-2:] == ["trainer.total_epochs=2", "+data.name='a b'"]


def test_the_check_runs_without_torch(tmp_path: Path) -> None:
    """ "Any machine": a Python in which torch, numpy and the engines cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Missing:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'numpy', 'triton', 'megatron', 'vllm', 'verl'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\nsys.meta_path.insert(0, Missing())\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*SCRIPT, "--check"], cwd="/", env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "" and done.stdout == run("--check").stdout
    control = subprocess.run([sys.executable, "-c", "import torch"], cwd="/", env=environment, capture_output=True, text=True, timeout=120)
    assert control.returncode == 1 and "No module named 'torch'" in control.stderr

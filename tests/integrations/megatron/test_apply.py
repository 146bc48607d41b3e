"""apply and undo: every symbol comes back, versions and moved symbols are named, a model never runs with half of the sums stock's."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch
from tiny_megatron import Setup, on_ranks

import tio_megatron as tio
from tio_megatron.contract import Contract, Cuts
from tio_megatron.integrations.megatron import cpu_device, versions
from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.megatron.applied.patches import GPT, all_patches
from tio_megatron.integrations.patching import MovedSymbolError, Patch, PatchSet
from tio_megatron.layers import grads
from tio_megatron.testing.qwen3 import write_tiny


@pytest.fixture(autouse=True)
def nothing_applied():
    tio.undo()
    yield
    tio.undo()


def symbols(patches):
    found = {}
    for patch in patches:
        owner, name = patch.owner()
        found[patch.target] = vars(owner).get(name)
    return found


def test_undo_restores_every_symbol():
    before = symbols(all_patches())
    tio.apply()
    during = symbols(all_patches())
    assert all(during[target] is not before[target] for target in before)
    tio.undo()
    after = symbols(all_patches())
    assert all(after[target] is before[target] for target in before)
    assert isinstance(vars(grads)["_sink"], grads.ToAutograd)


def test_cpu_device_restores_every_symbol():
    before = symbols(cpu_device._table())
    with cpu_device.enabled():
        assert torch.cuda.current_device() == torch.device("cpu")
        cpu_device.enable()
    after = symbols(cpu_device._table())
    assert all(after[target] is before[target] for target in before)
    assert "cuda" not in vars(torch.Tensor)


def test_the_cpu_device_comes_first():
    with tio.apply(), pytest.raises(RuntimeError, match="enable the device first"):
        cpu_device.enable()


def test_applying_twice_is_harmless_and_the_outer_block_decides():
    before = symbols(all_patches())
    with tio.apply(vocab_size=700):
        first = symbols(all_patches())
        with tio.apply(Contract(), vocab_size=700) as inner:
            assert inner.contract == Contract()
        assert symbols(all_patches()) == first and state.active() == Contract()
    assert symbols(all_patches()) == before and state.session() is None


def test_an_error_inside_the_block_undoes_too():
    before = symbols(all_patches())
    with pytest.raises(KeyError), tio.apply():
        raise KeyError
    assert symbols(all_patches()) == before


def test_another_contract_is_refused_and_the_difference_named():
    with tio.apply(vocab_size=700), pytest.raises(ValueError, match=r"cuts.attn_row: 8 / 4.*vocab_size: 700 / None.*undo"):
        tio.apply(Contract(cuts=Cuts(attn_row=4)))


def test_outside_a_contract_there_is_none():
    with pytest.raises(RuntimeError, match="no contract is applied"):
        state.active()


@pytest.mark.parametrize("target", ["megatron.core.no_such:thing", f"{GPT}.gone", GPT.replace("GPTModel", "Gone.forward")])
def test_a_moved_symbol_is_named_and_nothing_is_replaced(target):
    before = symbols(all_patches())
    with pytest.raises(MovedSymbolError, match=rf"{target}.*megatron-core .*{versions.FULL}"):
        PatchSet([*all_patches(), Patch(target, lambda original: None, why="")]).on()
    assert symbols(all_patches()) == before


def test_somebody_else_on_top_of_us_is_not_undone_silently():
    import megatron.core.tensor_parallel.mappings as mappings

    tio.apply()
    ours = mappings._reduce
    mappings._reduce = theirs = lambda *args: None
    with pytest.raises(RuntimeError, match="mappings:_reduce was replaced by somebody else"):
        tio.undo()
    assert mappings._reduce is theirs
    mappings._reduce = ours
    tio.undo()


@pytest.mark.parametrize("package, supported", [("torch", "2.13.0"), ("megatron-core", ", ".join(versions.RELEASES))])
def test_another_version_is_refused(package, supported, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9" if name == package else version(name))
    with pytest.raises(ImportError, match=rf"{package} 9.9.9 is installed; tio_megatron supports {package} {supported}"):
        tio.apply()
    assert state.session() is None


def test_a_missing_package_is_said():
    def gone(name):
        raise importlib.metadata.PackageNotFoundError(name)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(ImportError, match="torch is not installed"):
        patched.setattr(importlib.metadata, "version", gone)
        tio.apply()


def test_contract_and_vocabulary_in_one_mapping(tmp_path):
    with tio.apply({"cuts": {"vocab": 4}, "vocab_size": 700}) as applied:
        assert applied.contract.cuts.vocab == 4 and applied.session.vocab_size == 700
    file = tmp_path / "contract.json"
    file.write_text(json.dumps({"vocab_size": 32}))
    with tio.apply(file) as applied:
        assert applied.session.vocab_size == 32
    with pytest.raises(ValueError, match="given twice: 32 in the contract, 33"):
        tio.apply(file, vocab_size=33)
    with pytest.raises(ValueError, match="positive whole number"):
        tio.apply(vocab_size=0)


@pytest.mark.parametrize(
    "value, said",
    [(None, "None"), ('{"cuts": {"attn_row": 2}}', "2"), ("/no/such/file", "TIO_CONTRACT='/no/such/file'")],
)
def test_auto_reads_the_environment(value, said):
    code = "import tio_megatron.auto as a; print(a.setting and a.setting.contract.cuts.attn_row)"
    environment = {name: text for name, text in os.environ.items() if name != "TIO_CONTRACT"} | ({} if value is None else {"TIO_CONTRACT": value})
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert said in (done.stdout if done.returncode == 0 else done.stderr)
    assert (done.returncode == 0) == (value != "/no/such/file")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"))


def run(model):
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    return model(tokens, torch.arange(8)[None], None)


def failure(work):
    try:
        work()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing was refused"


def test_a_stock_model_does_not_run_under_a_contract(folder):
    def work(model, setup):
        with tio.apply():
            return failure(lambda: run(model))

    assert "built before tio_megatron.apply()" in on_ranks(Setup(folder, ordered=False), work)[0]


def test_our_model_does_not_run_without_its_contract(folder):
    def work(model, setup):
        tio.undo()
        alone = failure(lambda: run(model))
        with tio.apply(Contract(cuts=Cuts.uniform(4))):
            return alone, failure(lambda: run(model))

    alone, other = on_ranks(Setup(folder), work)[0]
    assert "no contract is applied" in alone and "another contract" in other


def test_inference_engines_are_refused(folder):
    def work(model, setup):
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        return failure(lambda: model(tokens, torch.arange(8)[None], None, inference_context=object()))

    assert "inference_context is not supported" in on_ranks(Setup(folder), work)[0]


def test_importing_the_package_imports_no_megatron():
    code = "import sys, tio_megatron, tio_megatron.integrations.megatron; print([m for m in sys.modules if m.startswith('megatron')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True).stdout.strip() == "[]"


def test_every_patch_says_why():
    assert all(patch.why for patch in [*all_patches(), *cpu_device._table()])

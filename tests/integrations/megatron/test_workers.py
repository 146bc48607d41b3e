"""Ranks of a real job: one that forgot to apply, one in which somebody patches over ours, and what each says when asked."""

import pytest
import torch

import tio_megatron
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract, Cuts, Layout
from tio_megatron.integrations import handshake, handshake_files
from tio_megatron.integrations.megatron.applied import workers
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny
from tio_megatron.verify.doctor import of_workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model") / "moe", MOE)


def building(folder, rank_main, monkeypatch, seconds="3"):
    """What each of two ranks' attempt to build a model says."""
    from tiny_megatron import Setup, build, running

    monkeypatch.setenv(handshake.VARIABLE, seconds)

    def work(rank):
        setup = Setup(folder, Layout(tp=2, etp=2, sp=True), ordered=False)
        with running(setup), Checkpoint(folder) as checkpoint:
            take_back = rank_main(rank)
            try:
                build(setup, checkpoint)
            except ValueError as error:
                return str(error)
            finally:
                torch.distributed.barrier()
                if take_back is not None:
                    take_back()
                tio_megatron.undo()
        return ""

    return run_ranks(2, work)


def apply(cuts=8):
    tio_megatron.apply(Contract(cuts=Cuts.uniform(cuts)), vocab_size=MOE["vocab_size"])


def test_a_rank_that_did_not_apply_is_named(folder, monkeypatch, tmp_path):
    monkeypatch.setenv(handshake_files.VARIABLE, str(tmp_path))
    said = building(folder, lambda rank: apply() if rank == 0 else None, monkeypatch)
    assert "rank 1: tio_megatron did not load there" in said[0] and "TIO_CONTRACT in its own environment" in said[0]
    (finding,) = [finding for finding in of_workers(tmp_path).findings if finding.level == "bad"]
    assert "megatron-core 0.16" in finding.what and "no answer from rank 1 of 2" in finding.what


def test_a_rank_with_another_contract_is_named_by_both(folder, monkeypatch):
    for said in building(folder, lambda rank: apply(8 if rank == 0 else 4), monkeypatch):
        assert "rank 1 (process" in said and "contract is" in said


def test_a_rank_in_which_somebody_patched_over_ours_is_named_by_both(folder, monkeypatch):
    def main(rank):
        apply()
        if rank == 1:
            from megatron.core.tensor_parallel import mappings

            ours, mappings._reduce = mappings._reduce, lambda *args, **kwargs: None
            return lambda: setattr(mappings, "_reduce", ours)
        return None

    for said in building(folder, main, monkeypatch):
        assert "rank 1 (process" in said and "megatron.core.tensor_parallel.mappings:_reduce: replaced by somebody else after tio_megatron" in said
        assert "apply tio_megatron last" in said and "rank 0" not in said


def test_every_rank_answers(folder, monkeypatch, tmp_path):
    monkeypatch.setenv(handshake_files.VARIABLE, str(tmp_path))

    def main(rank):
        apply()
        found = workers.all_workers()
        assert [worker["rank"] for worker in found] == [0, 1] and len({worker["pid"] for worker in found}) == 2
        assert all(len(worker["symbols"]) > 30 and worker["contract"] != "none" and not worker["problems"] for worker in found)
        assert found[0]["engine"].startswith("megatron-core 0.16")

    assert building(folder, main, monkeypatch) == ["", ""]
    found = of_workers(tmp_path, contract="1").findings
    assert "2 of 2 workers run contract" in found[0].what and not [finding for finding in found if finding.level == "bad"]
    assert [finding for finding in of_workers(tmp_path, contract='{"cuts": {"attn_row": 4}}').findings if finding.level == "bad"]
    monkeypatch.delenv(handshake_files.VARIABLE)
    (alone,) = workers.all_workers()
    assert alone["contract"] == "none" and "nothing is applied in this process" in alone["problems"][0]


def test_a_patch_below_ours_is_warned_of_at_start(caplog):
    from megatron.core.models.gpt.gpt_model import GPTModel

    before = GPTModel.forward
    scope: dict = {"__name__": "other_plugin.patches"}
    exec("def forward(self, *args, **kwargs): return None", scope)
    GPTModel.forward = scope["forward"]
    try:
        with tio_megatron.apply():
            pass
    finally:
        GPTModel.forward = before
    (said,) = [record.message for record in caplog.records if "patches it too" in record.message]
    assert said.startswith("megatron.core.models.gpt.gpt_model:GPTModel.forward is other_plugin's")

"""What workers leave in a folder, and what `tio doctor --workers` makes of it: by jobs and ranks, with the one that is missing or other named."""

import json
import uuid

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.contract import Contract
from tio_megatron.integrations import handshake, handshake_files, switch_names
from tio_megatron.testing import run_ranks
from tio_megatron.verify.doctor import of_workers, workers


def one(**changed):
    fields = dict(contract="c0", kernels="cpu-1", symbols=["a:b"], problems=[])
    return handshake.record("megatron-core", **(fields | changed))


def job(folder, monkeypatch, rank_main=lambda rank: one(), ranks=3):
    """What the ranks of one job leave, without starting them."""
    name = f"megatron-core-{uuid.uuid4().hex}"
    with monkeypatch.context() as patched:
        patched.setenv(handshake_files.VARIABLE, str(folder))
        patched.setattr(handshake_files, "_job", lambda engine: name)
        for rank in range(ranks):
            handshake_files.leave(rank_main(rank) | {"rank": rank}, range(ranks))


def bad(folder, **options):
    return [finding for finding in of_workers(folder, **options).findings if finding.level == "bad"]


def test_ranks_that_meet_are_one_job_and_the_one_that_left_no_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(handshake_files.VARIABLE, str(tmp_path / "w"))
    monkeypatch.setenv(handshake.VARIABLE, "2")

    def work(rank):
        handshake.meet(one(), range(3))
        dist.barrier()
        if rank != 1:  # stock: it knows nothing of us
            monkeypatch.setenv(handshake_files.VARIABLE, str(tmp_path / "lame"))
            with pytest.raises(ValueError, match="not in force in every worker"):
                handshake.meet(one(contract="c1"), range(3))
        dist.barrier()

    run_ranks(3, work)
    found = workers.read(tmp_path / "w")
    assert [answer["rank"] for answer in found] == [0, 1, 2] and len({answer["job"] for answer in found}) == 1
    assert not bad(tmp_path / "w") and "3 of 3 workers run contract c0" in of_workers(tmp_path / "w").findings[0].what
    assert not [path for path in (tmp_path / "w").iterdir() if not path.name.endswith(handshake_files.SUFFIX)], "a half-written file was left"
    (finding,) = bad(tmp_path / "lame")
    assert "no answer from rank 1 of 3" in finding.what and "runtime_env" in finding.works and "TIO_HANDSHAKE" in finding.works


@pytest.mark.parametrize("changed", [{"contract": "c1"}, {"kernels": "cpu-2"}, {"symbols": ["a:b", "a:c"]}, {"vocab_size": 7}, {"problems": ["m:f: replaced"]}])
def test_a_worker_that_runs_something_else_is_named(changed, tmp_path, monkeypatch):
    job(tmp_path, monkeypatch, lambda rank: one(**(changed if rank == 2 else {})))
    (finding,) = bad(tmp_path)
    assert "rank 2 (process" in finding.what and "rank 0" not in finding.what and "rank 1" not in finding.what


def test_switches_that_differ(tmp_path, monkeypatch):
    def main(rank):
        return one() | {"switches": {"TIO_COLLECTIVE_SCHEDULE": "ring", "MKL_DYNAMIC": "true", "NCCL_SOCKET_IFNAME": "lo"} if rank == 1 else {}}

    job(tmp_path, monkeypatch, main)
    (finding,) = bad(tmp_path)
    assert "TIO_COLLECTIVE_SCHEDULE is unset in rank 0, 2, ring in rank 1" in finding.what
    notes = [finding.what for finding in of_workers(tmp_path).findings if finding.level == "note"]
    assert any("MKL_DYNAMIC is unset in rank 0, 2, true in rank 1" in what for what in notes) and not any("SOCKET" in what for what in notes)
    assert any("rank 1: MKL_DYNAMIC='true': breaks" in what for what in notes)


def test_a_switch_that_breaks_the_order_is_bad(tmp_path, monkeypatch):
    job(tmp_path, monkeypatch, lambda rank: one() | {"switches": {"VLLM_BATCH_INVARIANT": "1"}}, ranks=2)
    (finding,) = bad(tmp_path)
    assert "every worker: VLLM_BATCH_INVARIANT='1': breaks" in finding.what


def test_two_jobs_in_one_folder_must_run_one_contract(tmp_path, monkeypatch):
    """A trainer and a rollout, or two replicas."""
    job(tmp_path, monkeypatch, ranks=2)
    job(tmp_path, monkeypatch, ranks=2)
    assert len({answer["job"] for answer in workers.read(tmp_path)}) == 2 and not bad(tmp_path)
    job(tmp_path, monkeypatch, lambda rank: one(contract="c1"), ranks=2)
    (finding,) = bad(tmp_path)
    assert "jobs in this folder run other contracts" in finding.what


def test_the_contract_that_all_should_run(tmp_path, monkeypatch):
    job(tmp_path, monkeypatch, lambda rank: one(contract=Contract().fingerprint("cpu-1")), ranks=2)
    assert not bad(tmp_path, contract="1")
    (finding,) = bad(tmp_path, contract='{"cuts": {"attn_row": 4}}')
    assert "as asked for" in finding.what


def test_no_secret_is_written(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "abc")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    held = one()["switches"]
    assert held["NCCL_ALGO"] == "Ring" and "abc" not in json.dumps(held)
    assert switch_names.read({"HOME": "x", "VLLM_X_TOKEN": "x", "OMP_NUM_THREADS": "1"}) == {"OMP_NUM_THREADS": "1"}


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert handshake_files.leave(one(), [0]) is None and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(handshake_files.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ValueError, match="TIO_HANDSHAKE=.*cannot be written.*or unset it"):
        handshake_files.leave(one(), [0])


def test_the_command(tmp_path, monkeypatch):
    def tio(*words):
        done = CliRunner().invoke(app, ["doctor", *words])
        return done.exit_code, done.output

    status, said = tio("--workers", str(tmp_path))
    assert status == 2 and "no worker has left an answer" in said and len(said.strip().splitlines()) == 1
    job(tmp_path, monkeypatch, ranks=2)
    assert tio("--workers", str(tmp_path))[0] == 0
    status, said = tio("--workers", str(tmp_path), "--model", "Qwen3-8B")
    assert status == 2 and "looked at alone" in said
    (path, other) = sorted(tmp_path.glob("*.json"))
    path.unlink()
    status, said = tio("--workers", str(tmp_path), "--json")
    assert status == 1 and "no answer from rank 0 of 2" in json.loads(said)["findings"][0]["what"]
    other.write_text("[" * 5000)
    status, said = tio("--workers", str(tmp_path))
    assert status == 2 and str(other) in said and len(said) < 500

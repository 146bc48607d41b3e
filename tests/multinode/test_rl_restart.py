"""``MAX_RESTARTS`` for reinforcement learning: ranks are killed between checkpoints, and the run ends by itself with the bytes of one that nobody disturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import launched
import netns_hosts as network
import pytest
from short_rl import SHORT, decided, metrics, wait

from tio_megatron.checkpoint import latest_training, training_state
from tio_megatron.rollouts import Store

pytestmark = pytest.mark.usefixtures("several_hosts")


def run(hosts: int, folder: Path, name: str, kills: list[tuple[int, int]], **more: str) -> str:
    """One run of ``rl`` over ``hosts`` with two ranks in all: each of ``kills`` is a rank, and after how many lines of metrics. Returns what was printed."""
    out = folder / name
    with network.hosts(hosts) as made:
        processes = launched.start(made, folder, ["rl", *SHORT, "--keep-rollouts", "--out", str(out)], MAX_RESTARTS=str(len(kills)), **more)
        for rank, lines in kills:
            wait(lambda lines=lines: len(metrics(out)) == lines, processes)
            (victim,) = [found[rank] for found in map(launched.ranks_on, made) if rank in found]
            os.kill(victim, signal.SIGKILL)
            wait(lambda victim=victim: not Path(f"/proc/{victim}").exists(), processes)
        ended = [process.communicate(timeout=300) for process in processes]
        assert [process.returncode for process in processes] == [0] * hosts, ended
        return "".join(said for said, _ in ended)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("hosts", [1, 2])
def test_killed_between_checkpoints(hosts, tmp_path):
    """Once the last rank (of another host, if there is one), which saved after step 2; once rank 0, with the engine, which saved after step 4."""
    run(1, tmp_path, "undisturbed", [])
    said = run(hosts, tmp_path, "killed", [(1, 3), (0, 5)], TIO_COLLECTIVE_SECONDS="30")
    assert "torchrun has started the ranks again: on from step 2" in said and "torchrun has started the ranks again: on from step 4" in said, said
    assert "on policy in 6 of 6 steps" in said, said
    first, second = tmp_path / "undisturbed", tmp_path / "killed"
    assert [step["step"] for step in decided(second)] == list(range(1, 7)) and decided(first) == decided(second)
    assert [latest_training(out / "checkpoints").name for out in (first, second)] == ["step-00000006"] * 2
    files = [training_state(latest_training(out / "checkpoints"))["files"] for out in (first, second)]
    assert files[0] == files[1]
    stores = [Store.open(out / "rollouts") for out in (first, second)]
    assert [store.batches for store in stores] == [6, 6]
    assert not any(stores[0].batch(number).same(stores[1].batch(number)) for number in range(6))
    assert len(list(second.glob("events.out.tfevents.*"))) == 1 and not list((second / "checkpoints").glob(".draft-*"))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_without_checkpoints_it_starts_anew_and_another_run_is_not_taken_over(tmp_path):
    short = [*SHORT, "--steps", "3", "--save-every"]
    with network.hosts(1) as made:
        (process,) = launched.start(made, tmp_path, ["rl", *short, "0", "--out", "first"], MAX_RESTARTS="1")
        wait(lambda: len(metrics(tmp_path / "first")) == 2, [process])
        os.kill(launched.ranks_on(made[0])[0], signal.SIGKILL)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and "again: on from step 0" in out and "on policy in 3 of 3" in out, (out, err)
    ended = launched.run(1, tmp_path, ["rl", *short, "3", "--out", "second"])
    assert ended[0][0] == 0 and decided(tmp_path / "first") == decided(tmp_path / "second"), ended
    ((status, _, said),) = launched.run(1, tmp_path, ["rl", *short, "1", "--out", "second"], MAX_RESTARTS="1")
    assert status == 2 and said.count("qwen3_moe: error: second/checkpoints: holds checkpoints of another run; go on from them with --resume") == 2, said
